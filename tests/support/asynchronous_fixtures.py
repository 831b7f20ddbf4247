"""A model of two linear layers, batches of each rank and step, and the gradient by its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

RATE = 0.1


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 2, bias=False))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)


def flat(model: nn.Module) -> Any:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy().copy()


def gradient(values: Any, rank: int, step: int) -> Any:
    """Return the gradient of the loss at some values, by the formula: two linear layers and a mean square."""
    one, two = values[:30].reshape(5, 6), values[30:].reshape(2, 5)
    inputs, targets = (each.numpy().astype(np.float64) for each in batch(rank, step))
    hidden = inputs @ one.T
    error = 2 * (hidden @ two.T - targets) / targets.size
    return np.concatenate([((error @ two).T @ inputs).reshape(-1), (error.T @ hidden).reshape(-1)])
