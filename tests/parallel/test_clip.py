"""Clipping of whole gradients, and the parameters that have them."""

from __future__ import annotations

import pytest
import torch
from support.replicas import assert_same, backward, gradients, make_gpt, make_mlp, vectors
from torch import nn

from hpctrain.parallel.clip import clip_whole_gradients
from hpctrain.parallel.model_agreement import trainable


def test_trainable_parameters_are_named_once() -> None:
    model = make_gpt()
    model.norm.weight.requires_grad_(False)
    names = [name for name, _ in trainable(model)]
    assert names == [name for name, _ in model.named_parameters() if name != "norm.weight"]
    assert "embedding.token.weight" in names and "head.weight" not in names


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 100.0, float("inf")])
def test_clipping_equals_torchs(max_norm: float) -> None:
    ours, plain = make_mlp(), make_mlp()
    for model in (ours, plain):
        backward(model, vectors())
        model[1].bias.grad = None
    norm = clip_whole_gradients(ours, max_norm)
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    assert norm.shape == () and norm == wanted
    assert_same(gradients(ours), gradients(plain), rtol=0, atol=0)


def test_nonfinite_gradients_are_not_scaled() -> None:
    model = make_mlp()
    backward(model, vectors())
    model[1].weight.grad[0, 0] = torch.inf
    before = gradients(model)
    assert clip_whole_gradients(model, 0.1) == torch.inf
    assert_same(gradients(model), before, rtol=0, atol=0)


def test_a_model_without_gradients_has_norm_zero() -> None:
    assert clip_whole_gradients(make_mlp(), 1.0) == 0
