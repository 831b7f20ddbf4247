"""Hogwild: updates in place within a node and row by row between nodes, compared with one process in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.asynchronous_fixtures import RATE, flat, gradient, make_model, make_worker, orders_of
from support.asynchronous_fixtures import passes as dense_passes
from support.asynchronous_fixtures import take_turns
from support.nodes import in_pairs, on_nodes, one_per_node
from support.tables import Lookups, make_lookups, passes, plain, values_of
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous.hogwild import Hogwild

pytestmark = pytest.mark.ranks


def test_a_scripted_order_of_dense_updates_equals_that_of_one_process(own: Any) -> None:
    strategy, optimizer = make_worker(own, "hogwild")
    values = flat(make_model()).astype(np.float64)
    for step, order in enumerate(orders_of(7, own.size, 5)):
        dense_passes(strategy, step)
        strategy.drain()
        take_turns(strategy, optimizer, order)
        values = values - RATE * sum(gradient(values, rank, step) for rank in order)
        optimizer.zero_grad()
    with strategy.consensus_view():
        np.testing.assert_allclose(flat(strategy.model), values, rtol=1e-4, atol=1e-5)
    strategy.detach()
    np.testing.assert_allclose(flat(strategy.model), values, rtol=1e-4, atol=1e-5)


@pytest.fixture(params=[None, one_per_node], ids=["in_place", "apart"])
def world(comm: Any, request: pytest.FixtureRequest) -> Any:
    """Return a communicator of all ranks on their real nodes, or one simulated node per rank."""
    own = comm.split(0) if request.param is None else on_nodes(comm, request.param)
    yield own
    own.free()


def make(comm: Any, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = make_lookups(kind)
    strategy = Hogwild(model, comm)
    strategy.check_optimizer(optimizer)
    return strategy, optimizer


def test_a_scripted_order_of_updates_equals_that_of_one_process(world: Any) -> None:
    strategy, optimizer = make(world, "sgd")
    orders = orders_of(7, world.size, 4)
    for step, order in enumerate(orders):
        passes(strategy.model, world.rank, step)
        strategy.drain()
        for rank in order:
            if rank == world.rank:
                assert float(strategy.clip_grad_norm(1e9)) > 0  # also sums up the gradients of the same row
                optimizer.step()
                optimizer.zero_grad()
            strategy.drain()
    expected = values_of(plain("sgd", orders)[0])
    with strategy.consensus_view():
        torch.testing.assert_close(values_of(strategy.model), expected, rtol=1e-4, atol=1e-5)
    strategy.detach()
    torch.testing.assert_close(values_of(strategy.model), expected, rtol=1e-4, atol=1e-5)


def counted(add: Any, added: list[int]) -> Any:
    """Return a wrapper that adds to memory and records the number of elements."""

    def count(keeper: int, values: torch.Tensor, *place: Any) -> None:
        added.append(values.numel())
        add(keeper, values, *place)

    return count


def test_between_nodes_only_rows_looked_up_are_read_and_added(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = on_nodes(comm, in_pairs if comm.size > 2 else one_per_node)
    strategy, optimizer = make(own, "sparse_adam")
    memory, added = strategy.memory, list[int]()
    for name in ("add", "add_rows"):
        monkeypatch.setattr(memory, name, counted(getattr(memory, name), added))
    with torch.no_grad():
        strategy.model.word.weight[[1, 2]] = 7.0  # read in an earlier step
    strategy.model(torch.tensor([[2, 2, 9]]), torch.tensor([[5]])).backward()
    assert strategy.model.word.weight[1].eq(7).all() and strategy.model.word.weight[2].ne(7).all()
    for rank in range(own.size):  # one after the other: a waiting rank serves others, which is also counted
        strategy.drain()
        if rank == own.rank:
            added.clear()
            optimizer.step()
            assert sorted(added) == sorted([4, 8] * own.nodes + [0] + [1] * (own.nodes - 1))
    strategy.drain()
    strategy.detach()
    own.free()


def test_the_rows_of_many_tables_are_those_of_the_model(comm: Any) -> None:
    own = on_nodes(comm, one_per_node)
    model = nn.ModuleList(nn.Embedding(2 + number, 3, sparse=True) for number in range(8))
    strategy = Hogwild(model, own)
    before = [table.weight.detach().clone() for table in model]
    for table in model:
        table(torch.arange(len(table.weight)))
    assert all(torch.equal(table.weight, values) for table, values in zip(model, before))
    strategy.detach()
    own.free()


def test_momentum_updates_all_rows_and_is_refused_between_nodes(world: Any) -> None:
    model = Lookups()
    strategy = Hogwild(model, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if world.nodes == 1:
        strategy.check_optimizer(optimizer)
    else:
        with pytest.raises(UsageError, match="SGD keeps momentum_buffer, by which rows of word.weight move"):
            strategy.check_optimizer(optimizer)
    strategy.detach()
