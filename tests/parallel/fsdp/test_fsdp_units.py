"""Division of a model into units: each parameter is in exactly one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replicas import make_gpt
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.fsdp.units import Unit, find_units


def untied() -> GPT:
    return GPT(GPTConfig(vocab_size=31, context=8, layers=2, heads=2, width=16, dropout=0.0, tied=False))


class Pair(nn.Module):
    """Two modules that may be identical, or share submodules."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one = one
        self.two = two

    def forward(self, x: Any) -> Any:
        """Map with both."""
        return self.two(self.one(x))


def names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


def held(units: list[Unit]) -> dict[str, list[str]]:
    return {unit.name: [name for name, _ in unit.parameters] for unit in units}


def refusal(model: nn.Module, *patterns: str) -> str:
    with pytest.raises(UsageError) as error:
        find_units(model, patterns)
    assert error.value.everywhere
    return str(error.value)


PATTERNS: list[tuple[str, ...]] = [(), ("Block",), ("blocks.*",), ("Block", "MLP"), ("Block", "embedding")]
CASES = [(make, patterns) for make in (make_gpt, untied) for patterns in PATTERNS]
CASES += [(untied, ("Linear", "*.*.norm?")), (untied, ("*",))]


@pytest.mark.parametrize("make, patterns", CASES)
def test_every_parameter_is_in_one_unit_with_all_its_names(make: Any, patterns: tuple[str, ...]) -> None:
    model = make()
    units = find_units(model, patterns)
    assert units[0].name == "" and units[0].module is model
    all_names = dict(model.named_parameters())
    pairs = [pair for unit in units for pair in unit.parameters]
    assert sorted(name for name, _ in pairs) == sorted(all_names)
    assert all(all_names[name] is parameter for name, parameter in pairs)
    for unit in units:
        assert unit.module is model.get_submodule(unit.name)
        assert [name for name in all_names if name in held([unit])[unit.name]] == held([unit])[unit.name]
        for (_, parameter), locations in zip(unit.parameters, unit.locations, strict=True):
            assert all(getattr(module, attribute) is parameter for module, attribute in locations)
            registered = {module: module.named_parameters("", False, False) for module in model.modules()}
            wanted = [(module, name) for module, pairs in registered.items() for name, p in pairs if p is parameter]
            assert locations == wanted
    order = list(dict(model.named_modules()))
    assert names(units) == sorted(names(units), key=order.index)


def test_patterns_match_class_names_and_module_names() -> None:
    model = untied()
    assert names(find_units(model, ["Block"])) == names(find_units(model, ["blocks.*"])) == ["", "blocks.0", "blocks.1"]
    assert names(find_units(model, ["blocks.1"])) == ["", "blocks.1"]
    assert names(find_units(model, ["blocks.*.mlp"])) == ["", "blocks.0.mlp", "blocks.1.mlp"]
    assert names(find_units(model, ["B*k", "head"])) == ["", "blocks.0", "blocks.1", "head"]
    assert names(find_units(model, ["GPT"])) == [""]


def test_a_star_does_not_match_a_dot() -> None:
    found = names(find_units(untied(), ["*.*"]))
    assert found == ["", "embedding.token", "embedding.position", "blocks.0", "blocks.1"]


def test_parameters_belong_to_the_innermost_unit() -> None:
    units = held(find_units(untied(), ["Block", "MLP"]))
    assert list(units) == ["", "blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp"]
    assert all(".mlp." in name for name in units["blocks.0.mlp"]) and len(units["blocks.0.mlp"]) == 4
    assert not any(".mlp." in name for name in units["blocks.0"]) and len(units["blocks.0"]) == 8


def test_the_model_itself_may_have_no_parameter_left() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    units = find_units(model, ["Linear"])
    assert names(units) == ["", "0", "1"] and units[0].parameters == units[0].locations == []


def test_units_without_parameters_are_dropped() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert names(find_units(model, ["Linear", "0"])) == ["", "0.0", "0.1", "1"]


def test_models_without_parameters_are_one_empty_unit() -> None:
    assert held(find_units(nn.Flatten())) == {"": []}


# Shared parameters and modules ----------------------------------------------------------------------------------------


def test_tied_parameters_belong_to_the_unit_around_all_uses() -> None:
    model = make_gpt()
    for patterns in (["Block", "embedding"], ["Block", "head"], ["Embedding"]):
        units = find_units(model, patterns)
        assert held(units)[""][0] == "embedding.token.weight"
        assert units[0].locations[0] == [(model.embedding.token, "weight"), (model.head, "weight")]
    assert "head" not in names(find_units(model, ["Block", "head"]))


def test_tied_parameters_inside_one_unit_stay_there() -> None:
    inner = Pair(nn.Linear(3, 3), nn.Linear(3, 3))
    inner.two.weight = inner.one.weight
    units = find_units(nn.Sequential(inner, nn.Linear(3, 3)), ["Pair"])
    assert held(units) == {"": ["1.weight", "1.bias"], "0": ["0.one.weight", "0.one.bias", "0.two.bias"]}
    assert units[1].locations[0] == [(inner.one, "weight"), (inner.two, "weight")]


def test_tied_parameters_of_nested_units_belong_to_the_outer_one() -> None:
    inner = Pair(nn.Linear(3, 3), nn.Linear(3, 3))
    inner.two.weight = inner.one.weight
    units = held(find_units(nn.Sequential(inner), ["Pair", "0.two"]))
    assert units == {"": [], "0": ["0.one.weight", "0.one.bias"], "0.two": ["0.two.bias"]}


def test_a_parameter_shared_by_two_units_is_refused() -> None:
    message = refusal(make_gpt(), "Block", "embedding", "head")
    assert message == (
        "units embedding and head share a parameter, embedding.token.weight being head.weight: choose one unit around "
        "both, or leave both to the model by choosing neither"
    )


def test_a_module_shared_by_two_units_is_refused_unless_it_is_a_unit() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(Pair(shared, nn.ReLU()), Pair(nn.Linear(3, 3), shared))
    message = refusal(model, "Pair")
    assert message.startswith("units 0 and 1 share a parameter, 0.one.weight being 1.two.weight: choose")
    units = find_units(model, ["Pair", "0.one"])
    assert held(units) == {"": [], "0.one": ["0.one.weight", "0.one.bias"], "1": ["1.one.weight", "1.one.bias"]}


def test_a_module_in_two_places_is_one_unit() -> None:
    shared = nn.Linear(3, 3)
    model = Pair(shared, shared)
    for pattern in ("Linear", "one", "two"):
        units = find_units(model, [pattern])
        assert held(units) == {"": [], "one": ["one.weight", "one.bias"]}
        assert units[1].locations == [[(shared, "weight")], [(shared, "bias")]]


def test_a_unit_used_inside_and_outside_another_keeps_its_parameters() -> None:
    shared = nn.Linear(3, 3)
    units = find_units(nn.Sequential(Pair(shared, nn.Linear(3, 3)), shared), ["Pair", "1"])
    assert held(units) == {"": [], "0": ["0.two.weight", "0.two.bias"], "0.one": ["0.one.weight", "0.one.bias"]}


# Patterns without a match ---------------------------------------------------------------------------------------------


def test_a_pattern_without_a_match_lists_the_candidates() -> None:
    assert refusal(untied(), "Block", "Blok") == (
        "unit pattern 'Blok' matches no module: the model has the classes Attention, Block, Embedding, GPT, LayerNorm, "
        "Linear, MLP and modules named embedding, embedding.token, embedding.position, blocks.0, blocks.0.norm1, "
        "blocks.0.attention, blocks.0.attention.qkv, blocks.0.attention.project, ..."
    )
    assert refusal(nn.Sequential(nn.Linear(2, 2)), "blocks.*").endswith(
        "has the classes Linear, Sequential and modules named 0"
    )


def test_a_pattern_for_a_container_gets_a_hint_to_name_its_members() -> None:
    for pattern in ("blocks", "ModuleList"):
        message = refusal(untied(), pattern)
        assert message == (
            f"unit pattern {pattern!r} matches blocks, which never runs, being a ModuleList: "
            "name its members, 'blocks.*'"
        )


def test_containers_among_other_matches_are_skipped() -> None:
    model = Pair(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]))
    assert names(find_units(model, ["???"])) == ["", "one"]


def test_a_pattern_for_an_attentions_projection_gets_a_hint_to_name_the_attention() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    assert refusal(model, "0.out_proj").endswith("by the MultiheadAttention around it and never called: name that, '0'")
    assert names(find_units(model, ["*Attention", "*"])) == ["", "0"]


def test_a_pattern_for_modules_without_parameters_is_refused() -> None:
    message = refusal(make_gpt(), "Dropout")
    assert message == "unit pattern 'Dropout' matches only modules without parameters, such as embedding.dropout"


def test_the_values_of_parameters_are_not_read() -> None:
    with torch.device("meta"):
        model = untied()
    assert names(find_units(model, ["Block"])) == ["", "blocks.0", "blocks.1"]
