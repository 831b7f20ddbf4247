"""Named shapes of models: published sizes, and refusal of impossible shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpctrain.errors import SettingsError
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import SHAPES, GPTConfig


@pytest.mark.parametrize(
    "name, published",
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("gpt2-1.5b", 1_557_611_200),
    ],
)
def test_gpt2_has_the_published_number_of_parameters(name: str, published: int) -> None:
    with torch.device("meta"):
        model = GPT(SHAPES[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == published == SHAPES[name].parameters


@pytest.mark.parametrize("name, millions", [("gpt-mini", 10.9), ("gpt-25m", 25.5), ("gpt-50m", 49.7)])
def test_small_shapes_have_the_size_of_their_name(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = GPT(SHAPES[name])
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_counts_the_parameters_of_the_model(tied: bool) -> None:
    config = GPTConfig(layers=3, heads=5, width=35, context=17, vocab_size=101, tied=tied)
    assert sum(parameter.numel() for parameter in GPT(config).parameters()) == config.parameters


@pytest.mark.parametrize(
    "change, message",
    [
        ({"heads": 5}, "width 12 and 5 heads: the heads must divide the width, nearest that do: 3, 4, 6"),
        ({"layers": 0}, "layers = 0: allowed are whole numbers above 0"),
        ({"width": 1.5}, "width = 1.5"),
        ({"context": True}, "context = True"),
        ({"vocab_size": -1}, "vocab_size = -1"),
        ({"dropout": 1.0}, "dropout = 1.0: allowed is 0 up to, not including, 1"),
        ({"dropout": -0.1}, "dropout = -0.1"),
    ],
)
def test_an_impossible_shape_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        GPTConfig(**{"layers": 2, "heads": 3, "width": 12, "context": 8, **change})
