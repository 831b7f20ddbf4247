"""Know when a unit computes: forward by its module, backward by the gradients of what it returned and was given.

Note: when a unit may be freed in the backward pass. When backward has left what the unit was given, all that lies on
the way has been computed. Beside the way there may be more, that leads to gradients of the unit's own parameters: so
they must have come, too, at least those that came in the last pass. What never leaves (no gradient is wanted for what
the unit was given) is freed at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpctrain.parallel.fsdp import hooks
from hpctrain.parallel.module_hooks import after_gradient
from hpctrain.plain_tensors import as_parts

if TYPE_CHECKING:
    from hpctrain.parallel.fsdp.passing import Passing, Station


class UnitHooks:
    """Let one unit be gathered and freed."""

    def __init__(self, passing: Passing, station: Station, begins: Callable[[], None]) -> None:
        self._passing, self._station, self._begins = passing, station, begins
        self._trained = [member for piece in station.pieces if piece.trained for member in piece.members]
        self._usual = {member.name for member in self._trained}  # those whose gradients came in the last pass
        self._came: set[str] = set()
        self._left = False

    def attach(self) -> list[RemovableHandle]:
        """Hook the unit's module and parameters."""
        handles = hooks.around_forward(self._station.module, self._before, self._after)
        for member in self._trained:
            handles.append(after_gradient(member.whole, self._take, member.name))
        return handles

    @as_parts
    def _before(self, args: Any, kwargs: Any) -> None:
        if self._passing.idle:
            return
        self._passing.need(self._station)
        if torch.is_grad_enabled() and not self._passing.going_back:
            hooks.when_backward_has_left((args, kwargs), self._leave)

    @as_parts
    def _after(self, args: Any, kwargs: Any, result: Any) -> None:
        # Activations that are computed again do not end the unit's backward pass.
        if self._passing.idle or self._passing.going_back:
            return
        if torch.is_grad_enabled():
            hooks.when_backward_comes_to(result, self._come)
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
