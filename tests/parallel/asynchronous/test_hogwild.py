"""Hogwild: one copy of the parameters per node, compared with one process that makes the same updates in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.asynchronous_fixtures import RATE, batch, flat, gradient, make_model
from torch import nn

from hpctrain.parallel.asynchronous.hogwild import Hogwild

pytestmark = pytest.mark.ranks


def make(comm: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = make_model()
    strategy = Hogwild(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    strategy.check_optimizer(optimizer)
    return strategy, optimizer


def passes(strategy: Any, step: int) -> None:
    inputs, targets = batch(strategy.comm.rank, step)
    nn.functional.mse_loss(strategy.model(inputs), targets).backward()


def test_a_scripted_order_of_updates_equals_that_of_one_process(own: Any) -> None:
    strategy, optimizer = make(own)
    values = flat(make_model()).astype(np.float64)
    chance = np.random.default_rng(7)
    for step in range(5):
        passes(strategy, step)
        strategy.drain()
        read = values.copy()
        for rank in chance.permutation(own.size).tolist():
            if rank == own.rank:
                optimizer.step()
            values = values - RATE * gradient(read, rank, step)
            strategy.drain()
        optimizer.zero_grad()
    with strategy.consensus_view():
        np.testing.assert_allclose(flat(strategy.model), values, rtol=1e-4, atol=1e-5)
    strategy.detach()
    np.testing.assert_allclose(flat(strategy.model), values, rtol=1e-4, atol=1e-5)


def test_of_simultaneous_updates_at_least_one_remains(own: Any) -> None:
    """N workers make M updates by one, simultaneous in each round: M to N x M of them take effect at every element."""
    strategy, optimizer = make(own)
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
