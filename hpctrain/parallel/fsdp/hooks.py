"""Hooks that unshard and reshard a unit: forward hooks of its module, and gradient hooks of its outputs and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpctrain.parallel.hooks import after_gradient, around_forward, when_backward_comes_to, when_backward_has_left
from hpctrain.plain_tensors import as_parts

if TYPE_CHECKING:
    from hpctrain.parallel.fsdp.unshard import UnitState, UnshardOnDemand


# Hooks that unshard and reshard a unit
#
# Note: when a unit may be freed in the backward pass. When the gradients of the unit's inputs have
# been computed, everything on the path from its outputs to its inputs has been computed. Other paths
# may still lead to gradients of the unit's own parameters. Therefore those gradients must have been
# computed too, at least for the parameters that received one in the last pass. A unit whose inputs
# require no gradient is freed at the end of the pass.


class UnitHooks:
    """Hooks that unshard and reshard one unit."""

    def __init__(self, passing: UnshardOnDemand, station: UnitState, begins: Callable[[], None]) -> None:
        self._passing, self._station, self._begins = passing, station, begins
        self._trained = [member for piece in station.pieces if piece.trained for member in piece.members]
        self._usual = {member.name for member in self._trained}  # parameters that received a gradient in the last pass
        self._came: set[str] = set()
        self._left = False

    def attach(self) -> list[RemovableHandle]:
        """Register hooks on the unit's module and parameters."""
        handles = around_forward(self._station.module, self._before, self._after)
        for member in self._trained:
            handles.append(after_gradient(member.whole, self._take, member.name))
        return handles

    @as_parts
    def _before(self, args: Any, kwargs: Any) -> None:
        if self._passing.idle:
            return
        self._passing.need(self._station)
        if torch.is_grad_enabled() and not self._passing.going_back:
            when_backward_has_left((args, kwargs), self._leave)

    @as_parts
    def _after(self, args: Any, kwargs: Any, result: Any) -> None:
        # The recomputation of activations does not end the unit's backward pass.
        if self._passing.idle or self._passing.going_back:
            return
        if torch.is_grad_enabled():
            when_backward_comes_to(result, self._come)
        self._passing.release(self._station)

    @as_parts
    def _come(self) -> None:
        self._begins()
        self._left = False
        self._passing.need(self._station)

    @as_parts
    def _leave(self) -> None:
        self._left = True
        self._free()

    @as_parts
    def _take(self, name: str, _: Tensor) -> None:
        self._came.add(name)
        if self._left:
            self._free()

    def _free(self) -> None:
        if self._came >= self._usual:
            self._passing.release(self._station)

    def end(self) -> None:
        """End a backward pass."""
        if self._came:
            self._usual, self._came = self._came, set()
        self._left = False
