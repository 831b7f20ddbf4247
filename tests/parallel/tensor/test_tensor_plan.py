"""Tensor plans: patterns of names give the kinds of modules; impossible plans are refused before any change."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tensor_fixtures import (
    BLOCKS,
    CLOSE,
    WIDTH,
    Block,
    assert_slices,
    make_blocks,
    make_gpt,
    split,
    tokens,
    vectors,
)
from torch import Tensor, nn

from hpctrain.errors import MismatchError, UsageError
from hpctrain.models.build import MultiLayerPerceptron
from hpctrain.models.gpt import GPT
from hpctrain.parallel.meta_init import materialise
from hpctrain.parallel.tensor.layers import ColumnParallel, Parallel, RowParallel
from hpctrain.parallel.tensor.plan import apply, choose
from hpctrain.parallel.tensor.plan_source import KINDS, parse, plan_of
from hpctrain.parallel.tensor.vocabulary import ParallelEmbedding

TWO = pytest.mark.ranks(2)


class Ranks:
    """Communicator of one of several simulated ranks, which never sends."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank


class Attention(nn.Module):
    """Attention with separate linear layers for queries, keys and values, and fewer heads of keys and values."""

    def __init__(self, heads: int = 4, few: int = 2, *, counts: bool = True, knows_width: bool = True) -> None:
        super().__init__()
        torch.manual_seed(7)
        width = WIDTH // heads
        if counts:
            self.num_heads = heads
        if knows_width:
            self.head_width = width
        self.query, self.output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, few * width), nn.Linear(WIDTH, few * width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, WIDTH]`` to the same shape."""
        query, key, value = (
            each(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        assert query.shape[1] == self.num_heads
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


ATTENTION = {"query": "heads", "key": "heads", "value": "heads", "output": "row"}


def test_lines_become_a_plan_in_which_the_last_line_of_a_pattern_counts() -> None:
    plan = parse(["*.fc=column", " *.project = row ", "head=vocabulary", "*.fc=whole"])
    assert list(plan.items()) == [("*.project", "row"), ("head", "vocabulary"), ("*.fc", "whole")]


@pytest.mark.parametrize("line", ["*.fc", "=column", "*.fc=", ""])
def test_malformed_lines_are_refused(line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"tensor plan {line!r}: allowed are pattern=kind, as in '*.fc=")):
        parse([line])


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="^tensor plan a=colum: allowed kinds are " + ", ".join(KINDS)):
        parse(["a=colum"])


def test_settings_extend_the_models_own_plan() -> None:
    plan = plan_of(make_gpt(), ["head=whole"])
    assert plan["blocks.*.mlp.fc"] == "column" and list(plan)[-1] == "head" and plan["head"] == "whole"
    with pytest.raises(UsageError, match="a model of class Sequential has no plan of how to split it over tensor"):
        plan_of(make_blocks())
    assert plan_of(make_blocks(), ["*.fc=column"]) == {"*.fc": "column"}


def test_later_patterns_win() -> None:
    chosen = {change.name: change.kind for change in choose(make_blocks(3), {"*.fc": "column", "1.*": "whole"})}
    assert chosen["0.fc"] == chosen["2.fc"] == "column" and chosen["1.fc"] == chosen["1.norm"] == "whole"


@TWO
def test_every_kind_becomes_its_class(comm: Any) -> None:
    model = make_gpt()
    found = split(model, comm)
    classes = {name: type(module) for name, module in found.modules.items()}
    assert classes["embedding.token"] is ParallelEmbedding and classes["head"] is ColumnParallel
    assert classes["blocks.1.attention.qkv"] is ColumnParallel and classes["blocks.0.mlp.project"] is RowParallel
    assert len(classes) == 2 + 4 * 2 and found.has_head


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("hidden", [(24,), (24, 12), (24, 12, 36)])
def test_the_mlp_has_its_own_plan(comm: Any, hidden: tuple[int, ...]) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(MultiLayerPerceptron((5,), 12, hidden))
    found = split(models[0], comm)
    assert len(found.modules) == (len(hidden) + 1) // 2 * 2
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(models[0](x), models[1](x), **CLOSE)


@TWO
@pytest.mark.parametrize("counts", [True, False])
def test_heads_of_separate_layers_are_split_whole(comm: Any, counts: bool) -> None:
    model, alone = Attention(), Attention()
    if not counts:
        del model.num_heads
    split(model, comm, ATTENTION)
    assert model.key.weight.shape == (WIDTH // 4, WIDTH)  # one head of two
    model.num_heads = 2 if not counts else model.num_heads  # divided once, whatever the number of layers
    torch.testing.assert_close(model(vectors()), alone(vectors()), **CLOSE)


def with_odd_keys(**options: bool) -> nn.Module:
    model = Attention(**options)
    model.key = nn.Linear(WIDTH, 10)
    return model


def with_computed_weight() -> nn.Module:
    model = make_blocks(1)
    torch.nn.utils.parametrizations.weight_norm(model[0].fc)
    return model


SHARED = "modules embedding.token and head share a parameter, so they must be split"
UNEQUAL = ({"head": "whole"}, {"embedding.token": "whole"}, {"head": "row"})
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, str], int, str]] = [
    (make_blocks, {"*.fcc": "column"}, 5, r"plan \*.fcc=column: no module has such a name; there are 0, 0.norm, 0.fc"),
    (make_blocks, {"*.norm": "column"}, 5, r"tensor plan \*.norm=column: module 0.norm: a LayerNorm is not a Linear"),
    (make_blocks, {"*.fc": "embedding"}, 5, "module 0.fc: a Linear is not an Embedding"),
    (make_blocks, {"*.fc": "heads"}, 5, "module 0.fc: how many heads there are"),
    (make_blocks, {"*.fc": "column", "1.project": "row"}, 5, "module 0.fc: 48 outputs cannot be split over 5 tensor"),
    (make_blocks, {"*.project": "row"}, 5, "module 0.project: 48 inputs cannot be split over 5 tensor ranks"),
    (
        lambda: Attention(8, 3),
        ATTENTION,
        4,
        "key=heads: module key: 3 heads cannot be split over 4 .* divide them are 1, 3, and multiples of 3 that "
        "divide the 8 query heads$",
    ),
    (Attention, ATTENTION, 3, "query=heads: module query: 4 heads cannot .* that divide them are 1, 2, 4$"),
    (lambda: Attention(counts=False), ATTENTION, 8, "query=heads: module query: 4 heads cannot be split over 8 tensor"),
    (
        lambda: Attention(counts=False, knows_width=False),
        ATTENTION,
        2,
        "how many heads there are must stand in its parent: as num_heads, heads, .* or the width of one as head_",
    ),
    (lambda: with_odd_keys(knows_width=False), ATTENTION, 2, "module key: 10 outputs are no whole number of 4 heads"),
    (with_odd_keys, ATTENTION, 2, "module key: 10 features are no whole number of heads of width 6"),
    (make_gpt, GPT.tensor_plan, 5, "12 heads cannot be split over 5 .* are 1, 2, 3, 4, 6, 12$"),
    # 36 groups of rows could be shared by 9 ranks, but not the heads, of three groups each.
    (make_gpt, GPT.tensor_plan, 9, "12 heads cannot be split over 9"),
    (lambda: nn.Sequential(nn.MultiheadAttention(WIDTH, 4)), {"*.out_proj": "row"}, 2, "takes its weight and never"),
    (with_computed_weight, BLOCKS, 2, "module 0.fc: its weight is computed"),
    *((make_gpt, GPT.tensor_plan | change, 2, SHARED) for change in UNEQUAL),
]


@pytest.mark.parametrize("make, plan, size, message", REFUSED)
def test_impossible_splits_are_refused_before_any_change(
    make: Callable[[], nn.Module], plan: dict[str, str], size: int, message: str
) -> None:
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UsageError, match=message) as error:
        apply(model, Ranks(size), plan)  # type: ignore[arg-type]
    assert error.value.everywhere
    assert not any(isinstance(module, Parallel) for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@TWO
def test_shared_parameters_may_stay_whole(comm: Any) -> None:
    model, alone = make_gpt(), make_gpt()
    found = split(model, comm, plan_of(model, ["head=whole", "embedding.token=whole"]))
    assert not found.has_head and not found.is_split("head.weight")
    torch.testing.assert_close(model(tokens()[0]), alone(tokens()[0]), **CLOSE)


@TWO
def test_a_split_model_cannot_be_split_again(comm: Any) -> None:
    model = make_blocks()
    split(model, comm, BLOCKS)
    with pytest.raises(UsageError, match="module 0.fc: it is split already"):
        split(model, comm, BLOCKS)


@pytest.mark.parametrize("plan", [BLOCKS, {**BLOCKS, "0": "scatter"}], ids=["never split", "never whole again"])
def test_sequence_parallelism_needs_a_first_and_a_last_module(plan: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="^sequence parallelism needs a module of kind scatter in the tensor plan"):
        apply(make_blocks(), Ranks(2), plan, sequence=True)  # type: ignore[arg-type]


@TWO
def test_modules_emptied_by_a_pipeline_are_unchanged(comm: Any) -> None:
    model = make_gpt()
    for path in ("embedding", "blocks.0"):
        for name, module in model.get_submodule(path).named_modules():
            if (path, name) != ("embedding", "token"):  # shared with the head, which is here
                for attribute, _ in list(module.named_parameters(recurse=False)):
                    setattr(module, attribute, None)
    found = split(model, comm)
    assert set(found.modules) == {
        "embedding.token",
        "head",
        *(f"blocks.1.{name}" for name in ("attention.qkv", "attention.project", "mlp.fc", "mlp.project")),
    }
    assert type(model.blocks[0].mlp.fc) is nn.Linear
    assert not any(name.startswith("blocks.0") for name in found.positions)
    alone = make_gpt()
    torch.testing.assert_close(model.blocks[1](vectors()), alone.blocks[1](vectors()), **CLOSE)
    assert model.head.weight is model.embedding.token.weight and model.head.weight.shape[0] < 31


@TWO
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_weights_are_those_of_rank_0(comm: Any, where: str) -> None:
    torch.manual_seed(40 + comm.rank)
    with torch.device(where):
        model = nn.Sequential(*(Block() for _ in range(2)))
    split(model, comm, BLOCKS)
    materialise(model, torch.device("cpu"))
    after = torch.rand(3)
    torch.manual_seed(40)
    with torch.device(where):
        alone = nn.Sequential(*(Block() for _ in range(2)))
    materialise(alone, torch.device("cpu"))
    torch.testing.assert_close(model(vectors()), alone(vectors()), **CLOSE)
    assert all(torch.equal(after, other) for other in comm.all_gather_object(after))  # and so are the dropout masks


@TWO
def test_different_models_are_refused(comm: Any) -> None:
    with pytest.raises(MismatchError, match="the ranks hold different models"):
        split(make_blocks(1 + comm.rank), comm, {"0.fc": "column", "0.project": "row"})


@TWO
@pytest.mark.parametrize("mixed", [False, True], ids=["meta", "partly meta"])
def test_self_initialising_modules_have_slices_of_the_unsplit_weights(comm: Any, mixed: bool) -> None:
    models = []
    for _ in range(2):
        with torch.device("meta"):
            models.append(make_blocks(3))
        if mixed:
            models[-1][1].fc = nn.Linear(WIDTH, 2 * WIDTH)
            nn.init.ones_(models[-1][1].fc.weight)
    model, alone = models
    torch.manual_seed(9)
    materialise(alone, torch.device("cpu"))
    torch.manual_seed(9)
    found = split(model, comm, BLOCKS)
    materialise(model, torch.device("cpu"))
    assert_slices(model, alone, found, lambda parameter: parameter.data)
