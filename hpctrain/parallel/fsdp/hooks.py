"""Hooks on the forward pass of a module, and on the beginning and end of its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from hpctrain.parallel.hooks import ModuleHook, after_gradient
from hpctrain.plain_tensors import as_parts

if TYPE_CHECKING:
    from hpctrain.parallel.fsdp.unshard import UnitState, UnshardOnDemand


def differentiable(values: Any) -> list[Tensor]:
    """Return the tensors in a nest of values that a backward pass can reach."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]


def when_backward_comes_to(outputs: Any, call: Callable[[], None]) -> None:
    """Call ``call`` once when the first gradient of a module's outputs has been computed."""
    tensors = differentiable(outputs)
    if tensors:
        register_multi_grad_hook(tensors, lambda _: call(), mode="any")


def when_backward_has_left(inputs: Any, call: Callable[[], None]) -> None:
    """Call ``call`` once when the gradients of all inputs of a module have been computed.

    It is never called if no input requires a gradient.
    """
    tensors = differentiable(inputs)
    if tensors:
        register_multi_grad_hook(tensors, lambda _: call(), mode="all")


def around_forward(
    module: nn.Module, before: Callable[[Any, Any], Any], after: Callable[[Any, Any, Any], None]
) -> list[RemovableHandle]:
    """Call ``before(args, kwargs)``, which may return replacements, and ``after(args, kwargs, result)``.

    If the forward pass raises, ``after`` is called with None as the result.
    """

    def first(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return before(args, kwargs)

    def last(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        after(args, kwargs, result)

    return [
        module.register_forward_pre_hook(ModuleHook(first), with_kwargs=True, prepend=True),
        module.register_forward_hook(ModuleHook(last), with_kwargs=True, always_call=True),
    ]


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return a nest of values with its floating-point tensors converted to another dtype."""

    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(one, values)


# Hooks that unshard and reshard a unit


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
