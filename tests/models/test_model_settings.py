"""Model settings: checked at construction, without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from hpctrain.errors import SettingsError
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import SHAPES, GPTConfig, ModelSettings
from hpctrain.settings import build, to_tree


def test_a_named_shape_is_changed_by_settings_and_data() -> None:
    assert ModelSettings(name="gpt2").gpt() == SHAPES["gpt2"]
    changed = ModelSettings(name="gpt-mini", layers=2, heads=4, width=64, context=32, dropout=0.1, tied=True).gpt(300)
    assert (changed.layers, changed.heads, changed.width, changed.context) == (2, 4, 64, 32)
    assert (changed.dropout, changed.tied, changed.vocab_size) == (0.1, True, 300)


def test_the_vocabulary_size_is_that_of_the_settings_the_data_or_the_shape() -> None:
    assert ModelSettings(name="gpt2").gpt().vocab_size == 50257
    assert ModelSettings(name="gpt2").gpt(256).vocab_size == 256
    assert ModelSettings(name="gpt2", vocab_size=512).gpt(256).vocab_size == 512
    with pytest.raises(SettingsError, match="model.vocab_size = 100: the data's vocabulary needs 256"):
        ModelSettings(vocab_size=100).gpt(256)


def test_the_window_is_known_before_the_model_is_built() -> None:
    assert ModelSettings(name="gpt2").window == 1024
    assert ModelSettings(name="gpt2", context=64).window == 64
    assert ModelSettings(name="mlp").window is None
    assert ModelSettings(factory="a.b:c", context=64).window == 64


def test_settings_round_trip_through_a_dict() -> None:
    tree = {"name": "mlp", "options": {"hidden": [3, 4]}, "meta": False}
    assert to_tree(build(ModelSettings, tree, "model.")) == tree


@pytest.mark.parametrize(
    "values, message",
    [
        ({"name": "gpt-tinny"}, "unknown model.name 'gpt-tinny': did you mean gpt-tiny.* known are convnet, gpt-25m"),
        ({"heads": 3}, "width 128 and 3 heads"),
        ({"context": 0}, "context = 0"),
        ({"name": "mlp", "context": 0}, "model.context = 0: allowed is 1 or more"),
        ({"options": {"layers": 3}}, "model.options do not apply to gpt-tiny: set layers, heads"),
        ({"name": "mlp", "layers": 3}, "model.layers applies to the GPT family, not to mlp: use model.options"),
        ({"factory": "a:b", "tied": False}, "model.tied applies to the GPT family, not to a:b"),
        ({"factory": "a.b"}, "model.factory = 'a.b': write it as package.module:function"),
        ({"factory": "a b:c"}, "write it as package.module:function"),
        ({"factory": ""}, "write it as package.module:function"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ModelSettings(**values)


def test_only_a_gpt_has_a_gpt_shape() -> None:
    with pytest.raises(SettingsError, match="model mlp is not of the GPT family"):
        ModelSettings(name="mlp").gpt()


def test_the_package_exports_the_names_that_it_lists_and_settings_load_no_torch() -> None:
    import hpctrain.models

    assert all(callable(getattr(hpctrain.models, name)) for name in hpctrain.models.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hpctrain.models.nonsense
    code = "import sys; from hpctrain.models import ModelSettings, GPTConfig; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# Named shapes of models: published sizes, and refusal of impossible shapes --------------------------------------------


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
