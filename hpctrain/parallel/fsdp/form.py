"""State what a strategy asks of the form in which parameters are kept: resident, or passing by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from hpctrain.collectives.communicator import Communicator


class Form(Protocol):
    """Let the model see whole parameters in its passes, and shards between them. Passes are calls by all ranks."""

    def hook(self, model: nn.Module, begins: Callable[[], None]) -> list[RemovableHandle]:
        """Be told by modules inside the model when they run; call ``begins`` when backward comes to the first."""

    def mark(self, *, frozen: bool = False) -> None:
        """Take note that shards have changed, maybe those of frozen parameters too."""

    def meet(self) -> None:
        """Wait until nobody computes any more with what this rank is about to change."""

    def begin_forward(self, *, records: bool) -> None:
        """Begin a forward pass of the whole model; ``records``: a backward pass may follow."""

    def end_forward(self, *, keeps: bool) -> None:
        """End it; ``keeps``: a backward pass may follow."""

    def begin_backward(self, *, reduces: bool) -> None:
        """Begin a backward pass; ``reduces``: its gradients are reduced."""

    def end_backward(self) -> None:
        """End it."""

    def settle(self, world: Communicator) -> None:
        """Let the ranks agree on what they have learned from a pass."""

    def stand_in(self, *, backward: bool) -> None:
        """Do in a pass what concerns the other ranks, without computing."""

    def summon(self) -> None:
        """Show all parameters whole."""

    def dismiss(self) -> None:
        """End that."""
