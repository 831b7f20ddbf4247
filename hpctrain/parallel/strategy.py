"""State what the training loop may ask of a strategy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Strategy(ABC):
    """Be attached to a module by hooks, and be asked only for what depends on how the ranks share the work."""

    model: nn.Module

    @contextmanager
    @abstractmethod
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate on each rank alone, for backward passes inside the ``with`` block."""
        yield

    @abstractmethod
    def contribute_nothing(self) -> None:
        """Take part in a forward and backward pass of the others, with no sample of one's own."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``; return the norm before, a scalar."""

    @abstractmethod
    def detach(self) -> None:
        """Take all hooks off the module."""


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that get gradients, each once, under the first of its names."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def clip_whole_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Clip gradients that this rank holds in full; return their norm before.

    Where the norm is not finite they stay as they are: scaling would spread NaN over all of them, and hide where it
    came from.
    """
    parameters = [parameter for _, parameter in trainable(model) if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if math.isfinite(max_norm) and bool(torch.isfinite(norm)):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
