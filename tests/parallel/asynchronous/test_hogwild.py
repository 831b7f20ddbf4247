"""Hogwild: one copy of the parameters per node, compared with one process that makes the same updates in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.asynchronous_fixtures import RATE, flat, gradient, make_model, make_worker, orders_of, passes, take_turns

pytestmark = pytest.mark.ranks


def test_a_scripted_order_of_updates_equals_that_of_one_process(own: Any) -> None:
    strategy, optimizer = make_worker(own, "hogwild")
    values = flat(make_model()).astype(np.float64)
    for step, order in enumerate(orders_of(7, own.size, 5)):
        passes(strategy, step)
        strategy.drain()
        take_turns(strategy, optimizer, order)
        values = values - RATE * sum(gradient(values, rank, step) for rank in order)
        optimizer.zero_grad()
    with strategy.consensus_view():
        np.testing.assert_allclose(flat(strategy.model), values, rtol=1e-4, atol=1e-5)
    strategy.detach()
    np.testing.assert_allclose(flat(strategy.model), values, rtol=1e-4, atol=1e-5)


def test_of_simultaneous_updates_at_least_one_remains(own: Any) -> None:
    """N workers make M updates by one, simultaneous in each round: M to N x M of them take effect at every element."""
    strategy, optimizer = make_worker(own, "hogwild")
    optimizer.param_groups[0]["lr"] = 1.0
    before = flat(strategy.model)
    for _ in range(50):
        for parameter in strategy.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        strategy.drain()
        optimizer.step()
        strategy.drain()
    with strategy.consensus_view():
        moved = before - flat(strategy.model)
    assert moved.max() <= 50 * own.size + 0.01 and moved.min() >= 50 - 0.01
    strategy.detach()
