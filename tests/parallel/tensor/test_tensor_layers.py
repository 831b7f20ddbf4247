"""Column- and row-parallel layers and embeddings split by rows, built by hand and compared with torch's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.tensor_fixtures import CLOSE, own
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.layers import ColumnParallel, RowParallel
from hpctrain.parallel.tensor.vocabulary import ParallelEmbedding

RANKS = pytest.mark.ranks(2, 3, 4)
WIDTH, INNER, WORDS = 10, 24, 31


def seeded(make: Any) -> Any:
    torch.manual_seed(5)
    return make()


def pairs(comm: Any, bias: bool, **options: Any) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(5)
    whole = nn.Linear(WIDTH, INNER, bias), nn.Linear(INNER, WIDTH, bias)
    torch.manual_seed(5)
    column = ColumnParallel(WIDTH, INNER, bias, comm=comm, **options)
    return *whole, column, RowParallel(INNER, WIDTH, bias, comm=comm)


@RANKS
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(WIDTH,), (7, WIDTH), (2, 3, WIDTH)], ids=["vector", "rows", "sequences"])
@pytest.mark.parametrize("apart", [False, True], ids=["fused", "separate"])
def test_column_and_row_equal_two_linear_layers(comm: Any, bias: bool, shape: tuple[int, ...], apart: bool) -> None:
    first, second, column, row = pairs(comm, bias)
    column.overlaps = row.overlaps = not apart
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    expected = second(torch.tanh(first(inputs[0])))
    found = row(torch.tanh(column(inputs[1])))
    torch.testing.assert_close(found, expected, **CLOSE)
    for each in (expected, found):
        each.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **CLOSE)
    torch.testing.assert_close(column.weight.grad, own(first.weight.grad, comm), **CLOSE)
    torch.testing.assert_close(row.weight.grad, own(second.weight.grad, comm, 1), **CLOSE)
    if bias:
        torch.testing.assert_close(column.bias.grad, own(first.bias.grad, comm), **CLOSE)
        torch.testing.assert_close(row.bias.grad, second.bias.grad, **CLOSE)


@RANKS
@pytest.mark.parametrize("features", [INNER, WORDS], ids=["equal", "unequal"])
def test_outputs_are_gathered_on_request_and_may_stay_split(comm: Any, features: int) -> None:
    whole = seeded(lambda: nn.Linear(WIDTH, features))
    column = seeded(lambda: ColumnParallel(WIDTH, features, comm=comm, gathers=True))
    inputs = [torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    expected, found = whole(inputs[0]), column(inputs[1])
    torch.testing.assert_close(found, expected, **CLOSE)
    for each in (expected, found):
        each.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **CLOSE)
    torch.testing.assert_close(column.weight.grad, own(whole.weight.grad, comm), **CLOSE)
    column.gathers = False
    torch.testing.assert_close(column(inputs[1]), own(expected, comm, 1), **CLOSE)


@RANKS
def test_only_trainable_weights_get_gradients(comm: Any) -> None:
    first, second, column, row = pairs(comm, True)
    for layer in (first, second, column, row):
        layer.weight.requires_grad_(False)
    inputs = torch.ones(3, WIDTH)
    second(first(inputs)).sum().backward()
    row(column(inputs)).sum().backward()
    assert column.weight.grad is None and row.weight.grad is None
    torch.testing.assert_close(column.bias.grad, own(first.bias.grad, comm), **CLOSE)
    torch.testing.assert_close(row.bias.grad, second.bias.grad, **CLOSE)


@RANKS
def test_results_are_unchanged_when_memory_is_reused(comm: Any) -> None:
    _, _, column, row = pairs(comm, False)
    inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = row(column(inputs))
    before = found.detach().clone()
    found.square().sum().backward()
    gradient = inputs.grad.clone()
    for turn in range(3):
        again = torch.full((3, WIDTH), float(turn), requires_grad=True)
        row(column(again)).square().sum().backward()
    assert torch.equal(found, before) and torch.equal(inputs.grad, gradient)


@RANKS
def test_a_converted_layer_keeps_its_objects_names_and_sizes(comm: Any) -> None:
    layer = seeded(lambda: nn.Linear(WIDTH, INNER))
    before = dict(layer.named_parameters())
    weight = layer.weight.detach().clone()
    column = ColumnParallel.convert(layer, comm)
    assert column is layer and isinstance(layer, nn.Linear)
    assert {name: id(one) for name, one in layer.named_parameters()} == {n: id(one) for n, one in before.items()}
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert (layer.in_features, layer.out_features) == (WIDTH, INNER)
    assert torch.equal(layer.weight, own(weight, comm))
    assert layer.weight.untyped_storage().nbytes() == layer.weight.numel() * 4  # the whole tensor is freed


@RANKS
def test_reinitialisation_gives_slices_of_torchs_values(comm: Any) -> None:
    for layer, plain, dim in (
        (RowParallel(INNER, WIDTH, comm=comm), lambda: nn.Linear(INNER, WIDTH), 1),
        (ColumnParallel(WIDTH, INNER, comm=comm), lambda: nn.Linear(WIDTH, INNER), 0),
        (ParallelEmbedding(WORDS, WIDTH, comm=comm), lambda: nn.Embedding(WORDS, WIDTH), 0),
    ):
        seeded(layer.reset_parameters)
        assert torch.equal(layer.weight, own(seeded(plain).weight, comm, dim))


@RANKS
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_supported(comm: Any, kind: torch.dtype) -> None:
    whole = seeded(lambda: nn.Linear(INNER, WIDTH, dtype=kind))
    row = seeded(lambda: RowParallel(INNER, WIDTH, dtype=kind, comm=comm))
    inputs = torch.randn(5, INNER, generator=torch.Generator().manual_seed(1)).to(kind)
    close = {"rtol": 0.05, "atol": 0.05} if kind is torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(row(own(inputs, comm, 1)), whole(inputs), **close)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda comm: ColumnParallel(4, 9, comm=comm), "9 outputs cannot be split over 2 tensor ranks: .* are 1, 3, 9"),
        (lambda comm: RowParallel(9, 4, comm=comm), "9 inputs cannot be split over 2 tensor ranks"),
        (lambda comm: ColumnParallel(4, 1, comm=comm, gathers=True), "1 outputs cannot be split over 2 tensor ranks"),
        (lambda comm: ColumnParallel.convert(nn.Embedding(4, 4), comm), "an Embedding is not a Linear"),
        (lambda comm: ParallelEmbedding(1, 4, comm=comm), "1 rows cannot be split over 2 .*: allowed are up to 1"),
        (lambda comm: ParallelEmbedding.convert(nn.Embedding(4, 4, max_norm=1.0), comm), "max_norm cannot be split"),
        (lambda comm: ParallelEmbedding.convert(nn.Embedding(4, 4, sparse=True), comm), "sparse cannot be split"),
    ],
)
def test_unsupported_layers_are_refused(comm: Any, make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(comm)


def test_on_one_rank_layers_equal_torchs(comm: Any) -> None:
    first, second, column, row = pairs(comm, True)
    x = torch.ones(2, WIDTH)
    torch.testing.assert_close(row(column(x)), second(first(x)))
    assert re.search("in_features=10, out_features=24", repr(column))
    split = seeded(lambda: ParallelEmbedding(WORDS, WIDTH, comm=comm))
    assert torch.equal(split(torch.tensor([1])), seeded(lambda: nn.Embedding(WORDS, WIDTH))(torch.tensor([1])))


@RANKS
@pytest.mark.parametrize("padding", [None, 0, 30])
def test_an_embedding_holds_some_rows_and_returns_all(comm: Any, padding: int | None) -> None:
    whole = seeded(lambda: nn.Embedding(WORDS, WIDTH, padding))
    split = seeded(lambda: ParallelEmbedding(WORDS, WIDTH, padding, comm=comm))
    tokens = torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(1))
    tokens[0, :2] = torch.tensor([0, WORDS - 1])
    torch.testing.assert_close(split.weight, own(whole.weight, comm))
    assert torch.equal(split(tokens), whole(tokens))
    for each in (whole, split):
        each(tokens).square().sum().backward()
    torch.testing.assert_close(split.weight.grad, own(whole.weight.grad, comm), **CLOSE)


@RANKS
@pytest.mark.parametrize("token", [-1, WORDS])
def test_a_token_outside_the_vocabulary_is_refused(comm: Any, token: int) -> None:
    layer = ParallelEmbedding(WORDS, WIDTH, comm=comm)
    with pytest.raises(UsageError, match=f"^token {token} is outside of the vocabulary: allowed are 0 to {WORDS - 1}$"):
        layer(torch.tensor([0, token]))
