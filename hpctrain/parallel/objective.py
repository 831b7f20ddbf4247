"""Objective of a step: the loss function, autocast dtype and clipping that a strategy needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.settings import function_named

Compare = Callable[[Any, Any], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over samples and, for tokens, positions, in float32."""
    return F.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error, in float32.

    If the samples of one side are vectors or scalars, the shapes of the samples may differ: targets
    ``[n]`` fit outputs ``[n, 1]``. The elements per sample must be equally many. Raises
    ``UsageError`` for other shapes, which torch would broadcast.
    """
    output_shape, target_shape = tuple(outputs.shape), tuple(targets.shape)
    if output_shape != target_shape:
        if (
            output_shape[:1] != target_shape[:1]
            or outputs.numel() != targets.numel()
            or min(len(output_shape), len(target_shape)) > 2
        ):
            raise UsageError(
                f"train.loss = 'mse': the model's output has shape {output_shape}, the targets have shape "
                f"{target_shape}; they must agree sample by sample"
            )
        targets = targets.reshape(output_shape)
    return F.mse_loss(outputs.float(), targets.float())


LOSSES: dict[str, Compare] = {"cross_entropy": cross_entropy, "mse": mse}


def loss_named(name: str) -> Compare:
    """Return a loss of ``LOSSES``, or the user's function named by ``package.module:function``."""
    if name in LOSSES:
        return LOSSES[name]
    function = function_named(name, "train.loss")

    def compare(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = function(outputs, targets)
        if isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point():
            return loss
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"train.loss {name} returned {what}, expected a tensor of one number, the mean of the samples")

    return compare


@dataclass(frozen=True)
class Objective:
    """Loss of a step: a mean over the samples, computed from outputs and targets; ``dtype`` enables autocast.

    ``max_norm`` is for strategies that make updates by themselves (pipedream): they clip gradients
    to this norm.
    """

    compare: Compare
    dtype: torch.dtype | None = None
    max_norm: float = float("inf")

    def computing(self, device: torch.device) -> torch.autocast:
        """Return the autocast context of the model's forward pass."""
        return torch.autocast(device.type, self.dtype, enabled=self.dtype is not None)
