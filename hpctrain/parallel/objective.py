"""Say what a step makes small, so that a strategy can compute it in pieces, and where its parts are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Compare = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over samples and, for tokens, positions, in float32."""
    return F.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean square of the difference, in float32."""
    return F.mse_loss(outputs.float(), targets.float())


LOSSES: dict[str, Compare] = {"cross_entropy": cross_entropy, "mse": mse}


@dataclass(frozen=True)
class Objective:
    """Compare outputs with targets, by a mean over the samples; the model computes under autocast where ``dtype`` says.

    ``max_norm`` is for strategies that make updates by themselves (pipedream): what their gradients are clipped to.
    """

    compare: Compare
    dtype: torch.dtype | None = None
    max_norm: float = float("inf")

    def computing(self, device: torch.device) -> torch.autocast:
        """Return the ``with`` block in which the model computes forward."""
        return torch.autocast(device.type, self.dtype, enabled=self.dtype is not None)
