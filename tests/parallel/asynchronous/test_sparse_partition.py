"""Detection of sparse tables and checks of their optimizer, and layout of the rows on their owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tables import Lookups, batch, make_lookups
from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import SingleTransport
from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous.parameter_server import ParameterServer
from hpctrain.parallel.asynchronous.partition import StateSpec, part_of, states_of
from hpctrain.parallel.asynchronous.sparse import find_tables

ADAM = StateSpec((("m", 0.0), ("v", 0.5)), "number")


def serve(model: nn.Module, optimizer: torch.optim.Optimizer) -> ParameterServer:
    strategy = ParameterServer(model, Communicator(SingleTransport()))
    strategy.check_optimizer(optimizer)
    return strategy


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_owners_hold_whole_rows_and_each_element_exactly_once(count: int) -> None:
    groups, tables = [7, 0, 12], [(4, 3, 1, ADAM), (2, 5, 0, StateSpec())]
    shares = [part_of(place, count, groups, StateSpec((("buffer", 0.0),)), tables) for place in range(count)]
    assert [row for one in shares for row in range(one.blocks[0].first, one.blocks[0].last)] == [0, 1, 2, 3]
    assert sum(one.dense for one in shares) == 19 and sum(one.length for one in shares) == 2 * 19 + 3 * 12 + 10
    for share in shares:
        memory = torch.arange(float(share.length))
        parts = [part.values for part in share.dense_parts(memory)]
        parts += [value for part in share.dense_parts(memory) for value in part.states.values()]
        parts += [block.matrix(memory) for block in share.blocks]
        found = torch.cat([part.reshape(-1) for part in parts])
        assert sorted(found.tolist()) == memory.tolist()
        block = share.blocks[0]
        rows = torch.arange(block.first, block.last)
        assert block.with_states(rows).tolist() == list(range(block.height))
        share.initialize_states(memory)
        assert memory.eq(0.5).sum() == block.rows * block.width


def test_tables_are_parameters_used_only_by_lookups() -> None:
    model = Lookups()
    assert [table.name for table in find_tables(model)] == ["word.weight", "bag.weight"]
    assert not find_tables(Lookups(sparse=False))
    model.head = nn.Linear(4, 13, bias=False)
    model.head.weight = model.word.weight
    assert [table.name for table in find_tables(model)] == ["bag.weight"]
    model.bag.weight.requires_grad_(False)
    assert not find_tables(model)
    with pytest.raises(UsageError, match="the embedding of weight has max_norm"):
        find_tables(nn.Embedding(3, 2, sparse=True, max_norm=1.0))


@pytest.mark.parametrize(
    "kind, options, expected",
    [
        (
            torch.optim.AdamW,
            {},
            "AdamW with these options cannot use the sparse gradients of word.weight .Adam does not",
        ),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "SGD keeps momentum_buffer, by which rows of word.weight move"),
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, "SGD with these options cannot use the sparse"),
        (torch.optim.Adagrad, {"weight_decay": 0.1}, "weight_decay option is not compatible with sparse gradients"),
        (torch.optim.SparseAdam, {}, "SparseAdam with these options cannot use dense gradients"),
    ],
)
def test_optimizers_without_sparse_support_are_refused(kind: Any, options: dict[str, Any], expected: str) -> None:
    model = Lookups()
    with pytest.raises(UsageError, match=expected):
        serve(model, kind(model.parameters(), **options))


def test_groups_are_checked_separately() -> None:
    """Momentum for only the dense parameters, the second group, is accepted; tables then have no state."""
    model = Lookups()
    tables, dense = [model.word.weight, model.bag.weight], list(model.head.parameters())
    mixed: list[dict[str, Any]] = [{"params": tables}, {"params": dense, "momentum": 0.9}]
    optimizer = torch.optim.SGD(mixed, lr=0.1)
    plain = Lookups()
    plain_tables, plain_dense = [plain.word.weight, plain.bag.weight], list(plain.head.parameters())
    groups: list[dict[str, Any]] = [{"params": plain_tables}, {"params": plain_dense, "momentum": 0.9}]
    alone = torch.optim.SGD(groups, lr=0.1)
    strategy = serve(model, optimizer)
    for step in range(3):
        for one, mover in ((model, optimizer), (plain, alone)):
            one(*batch(0, step)).backward()
            mover.step()
            mover.zero_grad()
    with strategy.consensus_view():
        assert {key for each in optimizer.state.values() for key in each} == {"momentum_buffer"}
        assert len(optimizer.state) == 2
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    strategy.detach()
    sparse = states_of(torch.optim.SparseAdam([nn.Parameter(torch.zeros(3))]), table="a table")
    assert sparse == StateSpec((("exp_avg", 0.0), ("exp_avg_sq", 0.0)), "number")


def test_unsuitable_gradients_are_named_and_refused() -> None:
    model = Lookups()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = serve(model, optimizer)
    (model(*batch(0, 0)) + model.word.weight.sum()).backward()
    with pytest.raises(UsageError, match="the parameter word.weight got a dense gradient: .* remove sparse=True"):
        optimizer.step()
    model.zero_grad()
    model.get_parameter("head.weight").grad = torch.zeros(3, 4).to_sparse()
    with pytest.raises(UsageError, match="the parameter head.weight got a sparse gradient: only those of nn.Embedding"):
        optimizer.step()
    strategy.detach()


def test_an_index_out_of_range_raises_torchs_error() -> None:
    model, optimizer = make_lookups("sgd")
    strategy = serve(model, optimizer)
    with pytest.raises(IndexError, match="out of range"):
        model(torch.tensor([[13]]), torch.tensor([[0]]))
    strategy.detach()
