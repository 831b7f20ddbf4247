"""Parameter server, compared with one process that makes the same updates with torch's optimizer in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.asynchronous_fixtures import batch, flat, make_model, make_worker, orders_of, take_turns
from support.tables import replay
from torch import nn

from hpctrain.errors import SettingsError, UsageError
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.parameter_server import ParameterServer
from hpctrain.parallel.asynchronous.partition import states_of
from hpctrain.parallel.asynchronous.staleness import may_update

KINDS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.9)),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    one, two = model.parameters()
    return [{"params": [two], "weight_decay": 0.0}, {"params": [one], "weight_decay": 0.1}]


def make_alone(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    return model, KINDS[kind](groups_of(model))


def make(comm: Any, kind: str, **server: Any) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = make_alone(kind)
    strategy = ParameterServer(model, comm, AsynchronousSettings(**server))
    strategy.check_optimizer(optimizer)
    return strategy, optimizer


def passes(model: nn.Module, rank: int, step: int) -> None:
    inputs, targets = batch(rank, step)
    nn.functional.mse_loss(model(inputs), targets).backward()


@pytest.mark.ranks
@pytest.mark.parametrize("lock", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scripted_order_of_arrivals_equals_that_of_one_process(own: Any, kind: str, lock: bool) -> None:
    strategy, optimizer = make(own, kind, lock=lock)
    orders = orders_of(5, own.size, 5)
    for step, order in enumerate(orders):
        passes(strategy.model, own.rank, step)
        strategy.drain()
        take_turns(strategy, optimizer, order)
    expected, _ = replay(lambda: make_alone(kind), passes, orders)
    with strategy.consensus_view():
        np.testing.assert_allclose(flat(strategy.model), flat(expected), rtol=1e-5, atol=1e-6)
        assert len(optimizer.state) == (0 if kind == "sgd" else 2)
    assert strategy.metrics()["staleness_most"] == own.size - 1
    strategy.detach()
    np.testing.assert_allclose(flat(strategy.model), flat(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("data, lock", [("server", True), ("server", False), ("hogwild", False)])
def test_all_updates_take_effect_with_the_lock_and_some_without(own: Any, data: str, lock: bool) -> None:
    """N workers make M updates by one: N x M with the lock, each worker at its own pace; else M to N x M together."""
    strategy, optimizer = make_worker(own, data, **({"lock": True} if lock else {}))
    optimizer.param_groups[0]["lr"] = 1.0
    before = flat(strategy.model)
    for _ in range(60):
        for parameter in strategy.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if not lock:
            strategy.drain()
        optimizer.step()
        if not lock:
            strategy.drain()
    with strategy.consensus_view():
        moved = before - flat(strategy.model)
    strategy.detach()
    assert moved.max() <= 60 * own.size + 0.01 and moved.min() >= 60 * (own.size if lock else 1) - 0.01


@pytest.mark.ranks
def test_no_update_is_staler_than_the_bound(own: Any) -> None:
    strategy, optimizer = make(own, "sgd", max_staleness=max(own.size - 1, 1))
    for step in range(20):
        passes(strategy.model, own.rank, step)
        optimizer.step()
    strategy.drain()
    found: Any = strategy.metrics()
    assert found["staleness_most"] <= max(own.size - 1, 1) and sum(found["staleness_histogram"]) == 20 * own.size
    strategy.detach()


@pytest.mark.ranks(2, 3, 4)
def test_ranks_may_only_hold_parameters(own: Any) -> None:
    strategy, optimizer = make(own, "adamw", ranks=1)
    assert strategy.computes is (own.rank < own.size - 1)
    if strategy.computes:
        assert strategy.data.size == own.size - 1 and strategy.store.exposed.lengths[own.rank] == 0
        for step in range(3):
            passes(strategy.model, own.rank, step)
            optimizer.step()
    with strategy.consensus_view():
        everyone = own.all_gather_object(flat(strategy.model).tobytes())
        assert len(set(everyone)) == 1 and not np.array_equal(flat(strategy.model), flat(make_model()))
    strategy.detach()


@pytest.mark.parametrize("workers, most", [(2, 1), (3, 2), (4, 3), (4, 6)])
def test_the_bound_holds_for_any_order_without_deadlock(workers: int, most: int) -> None:
    chance, worst = np.random.default_rng(workers), 0
    for _ in range(60):
        updates, read = 0, {}
        for _ in range(80):
            ready = [rank for rank in read if may_update(updates, read, rank, most)]
            idle = [rank for rank in range(workers) if rank not in read]
            oldest = min(read, key=lambda rank: read[rank], default=None)
            assert oldest is None or oldest in ready or read[oldest] in [read[rank] for rank in ready]
            rank = int(chance.choice([*ready, *idle]))
            if rank in read:
                worst = max(worst, updates - read.pop(rank))
                updates += 1
            else:
                read[rank] = updates
    assert worst == most


def test_bounds_below_the_number_of_other_workers_are_refused() -> None:
    from hpctrain.parallel.asynchronous.staleness import check_bound

    check_bound(0, 8)
    check_bound(7, 8)
    with pytest.raises(
        SettingsError, match="asynchronous.max_staleness = 6: with 8 workers that take turns it is 7 already"
    ):
        check_bound(6, 8)


def test_an_optimizer_without_elementwise_states_is_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    assert states_of(torch.optim.AdamW(parameters)).tensors == (("exp_avg", 0.0), ("exp_avg_sq", 0.0))
    assert states_of(torch.optim.Adagrad(parameters, initial_accumulator_value=0.5)).tensors == (("sum", 0.5),)
    with pytest.raises(UsageError, match="cannot hold it"):
        states_of(torch.optim.Adafactor([nn.Parameter(torch.zeros(3, 3))]))
