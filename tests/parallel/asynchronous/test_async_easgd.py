"""Asynchronous EASGD: workers exchange with the centre one by one, compared with the equations in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.asynchronous_fixtures import RATE, flat, gradient, make_model, make_worker, orders_of, passes, take_turns

from hpctrain.errors import DeadlineError, SettingsError
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.train.updates import check_policy

pytestmark = pytest.mark.ranks


def simulate(orders: list[list[int]], alpha: float) -> tuple[list[Any], Any]:
    """Return workers and centre after steps in which workers exchange with the centre in these orders."""
    centre = flat(make_model()).astype(np.float64)
    values = [centre.copy() for _ in orders[0]]
    for step, order in enumerate(orders):
        for rank in order:
            pull = alpha * (values[rank] - centre)
            values[rank] = values[rank] - pull - RATE * gradient(values[rank], rank, step)
            centre = centre + pull
    return values, centre


def check(strategy: Any, orders: list[list[int]], alpha: float) -> None:
    values, centre = simulate(orders, alpha)
    np.testing.assert_allclose(flat(strategy.model), values[strategy.comm.rank], rtol=1e-4, atol=1e-5)
    with strategy.consensus_view():
        np.testing.assert_allclose(flat(strategy.model), centre, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat(strategy.model), values[strategy.comm.rank], rtol=1e-4, atol=1e-5)
    strategy.detach()
    np.testing.assert_allclose(flat(strategy.model), centre, rtol=1e-4, atol=1e-5)


def test_a_scripted_order_of_arrivals_follows_the_equations(own: Any) -> None:
    strategy, optimizer = make_worker(own, "easgd", mode="asynchronous", rho=1.5)
    orders = orders_of(5, own.size, 6)
    for step, order in enumerate(orders):
        passes(strategy, step)
        take_turns(strategy, optimizer, order)
        optimizer.zero_grad()
    check(strategy, orders, RATE * 1.5)


def test_round_robin_follows_the_order_of_the_ranks(own: Any) -> None:
    """The test sets no order: each worker waits for its turn."""
    strategy, optimizer = make_worker(own, "easgd", mode="round-robin")
    for step in range(6):
        passes(strategy, step)
        optimizer.step()
        optimizer.zero_grad()
    check(strategy, [list(range(own.size))] * 6, 0.9 / own.size)


def test_no_pull_is_lost_in_any_order(own: Any) -> None:
    """Without gradients, the centre gains what the workers lose: the total sum is constant."""
    strategy, optimizer = make_worker(own, "easgd", mode="asynchronous", rho=2.0)
    with torch.no_grad():
        for parameter in strategy.model.parameters():
            parameter.fill_(float(own.rank + 1))
    strategy.drain()
    for _ in range(50):
        for parameter in strategy.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    strategy.drain()  # a rank that waits elsewhere does not serve others
    mine = flat(strategy.model).astype(np.float64)
    total = sum(own.all_gather_object(mine)) + strategy.centre().numpy()
    start = flat(make_model()) + sum(range(1, own.size + 1))
    np.testing.assert_allclose(total, start, rtol=1e-4)
    strategy.detach()


@pytest.mark.ranks(2)
def test_a_turn_that_never_comes_is_reported(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, optimizer = make_worker(own, "easgd", mode="round-robin")
    passes(strategy, 0)
    if own.rank == 1:
        monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.2")
        with pytest.raises(DeadlineError, match="rank 1 waited 0.2 s .* for its turn: it is rank 0's"):
            optimizer.step()
        monkeypatch.delenv("HPCTRAIN_TIMEOUT")
    strategy.drain()
    strategy.detach()


def test_policies_that_need_all_ranks_are_refused(own: Any) -> None:
    strategy, _ = make_worker(own, "easgd", mode="asynchronous")
    with pytest.raises(SettingsError, match="rollback"):
        check_policy(strategy, "rollback")
    check_policy(strategy, "skip")
    with pytest.raises(SettingsError, match='asynchronous.mode = "round-robin": an average is over all workers'):
        AsynchronousSettings(mode="round-robin", average=True)
    strategy.detach()
