"""Gradients of offloaded shards, hidden from the optimizer, and the factors by which they are still to be scaled.

Note: deferred scaling. Clipping would read and write every gradient once more. The update reads the
gradients anyway. Therefore only the factor is recorded, with the tensors to which it applies. A
tensor that is read before the update is scaled at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Gradients:
    """Gradients of the shards ``offloaded``: stored as their ``grad``, or set aside during an optimizer's step."""

    def __init__(self) -> None:
        self.offloaded: set[nn.Parameter] = set()
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._taken: dict[nn.Parameter, Tensor] = {}
        self._noted: dict[nn.Parameter, Tensor] = {}
        self._factor = 1.0

    def of(self, shard: nn.Parameter) -> Tensor | None:
        """Return the gradient of a shard, unscaled."""
        return self._aside.get(shard, shard.grad)

    def scale(self, shards: list[nn.Parameter], factor: Tensor) -> None:
        """Multiply the gradients of shards; those of offloaded shards are multiplied when they are used."""
        self.apply_scale()
        others = [shard.grad for shard in shards if shard not in self.offloaded and shard.grad is not None]
        if others:
            torch._foreach_mul_(others, factor.to(others[0].device))
        self._factor = float(factor)
        if self._factor != 1.0:
            found = {shard: self.of(shard) for shard in shards if shard in self.offloaded}
            self._noted = {shard: gradient for shard, gradient in found.items() if gradient is not None}

    def apply_scale(self, shards: Iterable[nn.Parameter] | None = None) -> None:
        """Apply pending factors now, to all gradients or to those of some shards."""
        for shard in list(self._noted) if shards is None else shards:
            gradient = self._noted.pop(shard, None)
            if gradient is not None and gradient is self._present(shard):
                gradient.mul_(self._factor)

    def factor(self, shard: nn.Parameter) -> float:
        """Return the factor by which the gradient of a shard is still to be multiplied."""
        noted = self._noted.get(shard)
        return self._factor if noted is not None and noted is self._present(shard) else 1.0

    def _present(self, shard: nn.Parameter) -> Tensor | None:
        return self._taken.get(shard, self.of(shard))

    def leave(self, shard: nn.Parameter, device: torch.device) -> None:
        """Remove a shard that has moved to the device, and move its gradient there."""
        self.apply_scale([shard])
        self.offloaded.discard(shard)
        if shard.grad is not None:
            shard.grad = shard.grad.to(device)

    def drop(self) -> None:
        """Drop the gradients that are set aside."""
        self._aside, self._noted = {}, {}

    # Around an update -------------------------------------------------------------------------------------------------

    def set_aside(self, held: set[nn.Parameter]) -> None:
        """Hide the gradients of offloaded shards that an optimizer holds."""
        self._aside = {}
        for shard in self.offloaded & held:
            if shard.grad is not None:
                self._aside[shard], shard.grad = shard.grad, None

    def taken(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that were set aside, except for shards that a closure has given new gradients since."""
        self._taken = {shard: gradient for shard, gradient in self._aside.items() if shard.grad is None}
        self._aside = {}
        return dict(self._taken)

    def forget_taken(self) -> None:
        """Drop the references to the gradients that ``taken`` returned; the caller owns them."""
        self._taken, self._noted = {}, {}

    def give_back(self) -> None:
        """Restore the ``grad`` of shards, which exists after a step of any optimizer."""
        for shard, gradient in self._taken.items():
            if shard.grad is None:
                shard.grad = gradient
        self._taken = {}
