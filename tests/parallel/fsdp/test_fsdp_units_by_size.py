"""Automatic units: repeated blocks, and modules of a suitable size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.models.gpt import GPT
from hpctrain.models.settings import GPTConfig
from hpctrain.parallel.fsdp.units import find_units, modules_by_size

WIDTH = 8
SMALL, LARGE = 500, 2000  # bytes; a layer holds 288


class Calling(nn.Module):
    """Container of named modules; the calls between them do not matter here."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self) -> None:
        """Do nothing."""


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def layers(count: int) -> Calling:
    """Return a module of ``count`` layers, 288 bytes each."""
    return Calling(**{f"layer{number}": layer() for number in range(count)})


def sized(elements: int) -> nn.Linear:
    return nn.Linear(elements, 1, bias=False)


def found(model: nn.Module, smallest: int = SMALL, largest: int = LARGE) -> list[str]:
    chosen = modules_by_size(model, smallest, largest)
    return [name for name, module in model.named_modules() if module in chosen]


def test_a_full_size_gpt_is_divided_into_blocks_and_large_tables() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, context=1024, layers=3, heads=12, width=768, dropout=0.0, tied=False))
    units = find_units(model)
    assert [unit.name for unit in units] == [
        *["", "embedding.token", "embedding.position", "blocks.0", "blocks.1", "blocks.2", "head"]
    ]
    assert [name for name, _ in units[0].parameters] == ["norm.weight", "norm.bias"]


def test_a_tied_table_belongs_to_the_model_without_an_error() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, context=1024, layers=3, heads=12, width=768, dropout=0.0, tied=True))
    units = find_units(model)
    assert [unit.name for unit in units] == ["", "embedding.position", "blocks.0", "blocks.1", "blocks.2"]
    assert [name for name, _ in units[0].parameters] == ["embedding.token.weight", "norm.weight", "norm.bias"]


def test_modules_between_the_sizes_are_units() -> None:
    sizes = [SMALL - 4, SMALL, LARGE, LARGE + 4]
    model = Calling(**{f"held{size}": sized(size // 4) for size in sizes})
    assert found(model) == ["held500", "held2000", "held2004"]  # the last has no submodules to divide


def test_larger_modules_are_divided_and_smaller_ones_stay() -> None:
    model = Calling(large=Calling(four=layers(4), one=layers(1), three=layers(3)), two=layers(2), one=layers(1))
    assert found(model) == ["large.four", "large.three", "two"]


def test_a_module_at_the_upper_limit_is_kept_whole() -> None:
    model = Calling(part=layers(4))
    assert found(model, smallest=288, largest=4 * 288) == ["part"]
    assert found(model, smallest=288, largest=4 * 288 - 1) == [f"part.layer{number}" for number in range(4)]


def test_the_rest_is_a_unit_if_it_is_large_enough() -> None:
    model = Calling(large=Calling(four=layers(4), one=layers(1), other=layers(1), three=layers(3)))
    assert found(model) == ["large", "large.four", "large.three"]
    assert [len(unit.parameters) for unit in find_units(model, smallest=SMALL, largest=LARGE)] == [0, 4, 8, 6]


@pytest.mark.parametrize("gather", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_repeated_blocks_are_units_of_any_size(gather: Any, count: int) -> None:
    model = Calling(stem=layer(), body=Calling(blocks=gather([layers(count) for _ in range(3)])))
    assert found(model) == ["body.blocks.0", "body.blocks.1", "body.blocks.2"]


def test_blocks_of_a_dictionary_are_units() -> None:
    model = Calling(blocks=nn.ModuleDict({"a": layers(1), "b": layers(2), "c": nn.ReLU()}))
    assert found(model) == ["blocks.a", "blocks.b"]


def test_a_model_that_is_a_sequence_of_blocks_is_divided() -> None:
    assert found(nn.Sequential(layer(), layers(2), layers(2), nn.ReLU(), layer())) == ["0", "1", "2", "4"]


def test_plain_sequences_are_divided_by_size() -> None:
    assert found(nn.Sequential(layer(), nn.ReLU(), layer(), layers(2))) == ["3"]
    assert found(Calling(head=nn.Sequential(layer(), nn.ReLU(), layer()), other=layer())) == ["head"]


def test_nested_blocks_are_not_divided() -> None:
    block = Calling(inner=nn.ModuleList([layers(1), layers(1)]), wide=layers(3))
    assert found(Calling(blocks=nn.ModuleList([block, layers(1)]))) == ["blocks.0", "blocks.1"]


def test_too_large_blocks_are_divided_only_by_nested_lists() -> None:
    block = Calling(experts=nn.ModuleList([layers(2), layers(2)]), wide=layers(6))
    expected = ["blocks.0", "blocks.0.experts.0", "blocks.0.experts.1", "blocks.1"]
    assert found(Calling(blocks=nn.ModuleList([block, layers(1)]))) == expected


def test_lists_that_are_a_small_part_stay_in_the_surrounding_unit() -> None:
    few = nn.ModuleList([sized(10), sized(10)])  # 80 bytes
    assert found(Calling(rest=sized(320), few=few)) == ["rest"]
    assert found(Calling(rest=sized(299), few=few)) == ["rest", "few.0", "few.1"]  # just above a sixteenth
    many = nn.ModuleList([sized(10) for _ in range(13)])  # 520 bytes
    assert found(Calling(rest=sized(100_000), many=many))[1:] == [f"many.{number}" for number in range(13)]


def test_containers_that_are_never_called_are_replaced_by_their_members() -> None:
    holder = nn.Module()
    holder.two, holder.one = layers(2), layers(1)
    nested = nn.ModuleList([nn.ModuleDict({"a": layers(1)}), nn.ModuleList([layers(1)])])
    model = Calling(holder=holder, nested=nested, scales=nn.ParameterList([torch.ones(300)]))
    assert found(model) == ["holder.two", "nested.0.a", "nested.1.0"]


def test_attention_is_not_divided() -> None:
    model = Calling(attention=nn.MultiheadAttention(32, 2), other=layer())
    assert sum(parameter.nbytes for parameter in model.parameters()) > LARGE
    assert found(model) == ["attention"]


def test_one_block_used_many_times_is_one_unit() -> None:
    block = layers(2)
    model = Calling(blocks=nn.ModuleList([block, block, block]))
    units = find_units(model, smallest=SMALL, largest=LARGE)
    assert [(unit.name, len(unit.parameters)) for unit in units] == [("", 0), ("blocks.0", 4)]


def test_layers_shared_by_blocks_belong_to_the_model() -> None:
    shared = layer()
    model = Calling(blocks=nn.ModuleList([Calling(own=layer(), shared=shared) for _ in range(2)]))
    units = find_units(model, smallest=SMALL, largest=LARGE)
    assert [name for name, _ in units[0].parameters] == ["blocks.0.shared.weight", "blocks.0.shared.bias"]
    assert [unit.name for unit in units[1:]] == ["blocks.0", "blocks.1"]
