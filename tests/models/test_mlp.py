"""Multilayer perceptron: matrix products with ReLU in between."""

from __future__ import annotations

import pytest
import torch

from hpctrain.errors import SettingsError
from hpctrain.models.build import MultiLayerPerceptron


def test_outputs_equal_those_of_plain_products() -> None:
    torch.manual_seed(0)
    model = MultiLayerPerceptron((2, 3), outputs=4, hidden=[5, 7])
    x = torch.randn(6, 2, 3)
    parameters = list(model.parameters())
    assert [tuple(p.shape) for p in parameters] == [(5, 6), (5,), (7, 5), (7,), (4, 7), (4,)]
    y = x.reshape(6, 6)
    for weight, bias in zip(parameters[0:4:2], parameters[1:4:2]):
        y = torch.einsum("bi,oi->bo", y, weight).add(bias).clamp_min(0)
    torch.testing.assert_close(model(x), torch.einsum("bi,oi->bo", y, parameters[4]) + parameters[5])


def test_without_hidden_layers_it_is_a_linear_model() -> None:
    assert [tuple(p.shape) for p in MultiLayerPerceptron((3,), 2, hidden=()).parameters()] == [(2, 3), (2,)]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"mlp with sizes \[3, 0, 2\]"):
        MultiLayerPerceptron((3,), 2, hidden=[0])
