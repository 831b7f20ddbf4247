"""A model of two linear layers, its strategy, batches of each rank and step, and the gradient by its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.wrap import attach

RATE = 0.1


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 2, bias=False))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)


def make_worker(comm: Any, data: Any, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return the asynchronous strategy of a model, and its optimizer."""
    model = make_model()
    strategy = attach(model, comm, ParallelSettings(data=data), asynchronous=AsynchronousSettings(**settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    strategy.check_optimizer(optimizer)
    return strategy, optimizer


def passes(strategy: Any, step: int = 0) -> None:
    """Compute the gradients of this rank's batch of a step."""
    inputs, targets = batch(strategy.comm.rank, step)
    mse_loss(strategy.model(inputs), targets).backward()


def orders_of(seed: int, workers: int, steps: int) -> list[list[int]]:
    """Return random orders in which the workers update, one per step."""
    chance = np.random.default_rng(seed)
    return [chance.permutation(workers).tolist() for _ in range(steps)]


def take_turns(strategy: Any, optimizer: torch.optim.Optimizer, order: list[int]) -> None:
    """Make the update of each rank, one after the other. Collective."""
    for rank in order:
        if rank == strategy.comm.rank:
            optimizer.step()
        strategy.drain()


def flat(model: nn.Module) -> Any:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy().copy()


def gradient(values: Any, rank: int, step: int) -> Any:
    """Return the gradient of the loss at some values, by the formula: two linear layers and a mean square."""
    one, two = values[:30].reshape(5, 6), values[30:].reshape(2, 5)
    inputs, targets = (each.numpy().astype(np.float64) for each in batch(rank, step))
    hidden = inputs @ one.T
    error = 2 * (hidden @ two.T - targets) / targets.size
    return np.concatenate([((error @ two).T @ inputs).reshape(-1), (error.T @ hidden).reshape(-1)])
