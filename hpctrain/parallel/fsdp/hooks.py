"""Hooks that unshard and reshard a unit: forward hooks of its module, and gradient hooks of its outputs and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hpctrain.parallel.hooks import after_backward, after_gradient, around_forward, before_backward
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

    def __init__(self, residency: UnshardOnDemand, unit: UnitState, on_backward: Callable[[], None]) -> None:
        self._residency, self._unit, self._on_backward = residency, unit, on_backward
        self._trained = [member for group in unit.groups if group.trained for member in group.members]
        # parameters that received a gradient in the last pass
        self._expected = {member.name for member in self._trained}
        self._received: set[str] = set()
        self._inputs_done = False

    def attach(self) -> list[RemovableHandle]:
        """Register hooks on the unit's module and parameters."""
        handles = around_forward(self._unit.module, self._before, self._after)
        for member in self._trained:
            handles.append(after_gradient(member.unsharded, self._after_gradient, member.name))
        return handles

    @as_parts
    def _before(self, args: Any, kwargs: Any) -> None:
        if self._residency.idle:
            return
        self._residency.unshard_unit(self._unit)
        if torch.is_grad_enabled() and not self._residency.in_backward:
            after_backward((args, kwargs), self._after_inputs)

    @as_parts
    def _after(self, args: Any, kwargs: Any, result: Any) -> None:
        # The recomputation of activations does not end the unit's backward pass.
        if self._residency.idle or self._residency.in_backward:
            return
        if torch.is_grad_enabled():
            before_backward(result, self._begin_backward)
        self._unit.reshard()

    @as_parts
    def _begin_backward(self) -> None:
        self._on_backward()
        self._inputs_done = False
        self._residency.unshard_unit(self._unit)

    @as_parts
    def _after_inputs(self) -> None:
        self._inputs_done = True
        self._reshard_if_done()

    @as_parts
    def _after_gradient(self, name: str, _: Tensor) -> None:
        self._received.add(name)
        if self._inputs_done:
            self._reshard_if_done()

    def _reshard_if_done(self) -> None:
        if self._received >= self._expected:
            self._unit.reshard()

    def end_backward(self) -> None:
        """End a backward pass."""
        if self._received:
            self._expected, self._received = self._received, set()
        self._inputs_done = False
