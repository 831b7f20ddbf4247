"""Interface of the residency of parameters: either kept unsharded, or unsharded on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from hpctrain.collectives.communicator import Communicator


class Form(Protocol):
    """Residency of parameters: unsharded in the passes of the model, sharded between them. Passes are collective."""

    def hook(self, model: nn.Module, begins: Callable[[], None]) -> list[RemovableHandle]:
        """Register hooks on modules inside the model; call ``begins`` when backward reaches the first of them."""

    def mark(self, *, frozen: bool = False) -> None:
        """Mark the unsharded parameters as stale after a change of shards; ``frozen``: of frozen parameters too."""

    def meet(self) -> None:
        """Wait until no rank computes with the memory that this rank is about to change."""

    def begin_forward(self, *, records: bool) -> None:
        """Begin a forward pass of the whole model; ``records``: a backward pass may follow."""

    def end_forward(self, *, keeps: bool) -> None:
        """End the forward pass; ``keeps``: a backward pass may follow."""

    def begin_backward(self, *, reduces: bool) -> None:
        """Begin a backward pass; ``reduces``: its gradients are reduced."""

    def end_backward(self) -> None:
        """End the backward pass."""

    def settle(self, world: Communicator) -> None:
        """Make the ranks agree on the order of collectives that a pass has recorded."""

    def stand_in(self, *, backward: bool) -> None:
        """Take part in the collectives of a pass without computing."""

    def summon(self) -> None:
        """Unshard all parameters."""

    def dismiss(self) -> None:
        """Reshard all parameters."""
