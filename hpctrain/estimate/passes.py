"""Find out what a pass of a layer holds: run it forward and back on fake tensors, and keep account.

Note: a layer by itself. Its input is no leaf, so that autograd keeps it only where the layer needs it; its output is
let go of, so that what is left of it is what the layer keeps; and the gradient that comes to it is made by the backward
pass, as it is in a model. What a row of layers holds follows from those of its layers, so equal ones run once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from hpctrain.estimate.fake import faked
from hpctrain.estimate.ledger import Ledger, key_of
from hpctrain.parallel.pipeline.deferred import Deferred

Call = Callable[[Any], Any]


@dataclass(frozen=True)
class LayerPass:
    """Hold the bytes of one forward and backward pass of a layer, its parameters left out.

    ``fresh`` is the most that the backward pass adds where every gradient of a parameter is kept, ``passing`` where
    each is taken away, or added to one that is there, when it has come. ``held`` is what waits for gradients of weights
    where these are put off (and ``weights`` the most that those add), else 0.
    """

    inside: int  # what autograd keeps, input and output left out
    output: int
    keeps_output: bool  # autograd keeps it for this layer
    needs_input: bool
    forward: int  # the most that the forward pass adds, output included
    fresh: int
    passing: int
    held: int = 0
    weights: int = 0


@dataclass(frozen=True)
class Passed:
    """Hold what was found, and what the next layer gets."""

    found: LayerPass
    gives: Any  # a tensor or a tuple of tensors, on fake memory


def measure(call: Call, given: Any, parameters: Sequence[nn.Parameter], *, splits: bool = False) -> Passed:
    """Run a layer on something like ``given``; ``splits``: gradients of weights are put off. Only when ``faking``."""
    kept = _pass(call, given, parameters, takes_away=False, splits=splits)
    away = _pass(call, given, parameters, takes_away=True, splits=splits)
    return replace(kept, found=replace(kept.found, passing=away.found.fresh))


def _pass(call: Call, given: Any, parameters: Sequence[nn.Parameter], *, takes_away: bool, splits: bool) -> Passed:
    leaves = tree_map_only(Tensor, _leaf, given)
    ledger = Ledger(fake=True)
    ledger.ignore([*parameters, *tree_leaves(leaves)])
    store = Deferred() if splits else None
    hooks = [_hook(one) for one in parameters if takes_away]
    with ledger:
        came = tree_map_only(Tensor, _enter, leaves)
        inputs = _keys(came)
        start = ledger.start_peak()
        with _putting_off(store):
            result = call(came)
        forward = ledger.peak - start
        gives, outputs = tree_map_only(Tensor, faked, result), set(_keys(result)) - set(inputs)
        del came
        after, output = ledger.live, sum(map(ledger.bytes_of, outputs))
        needed = sum(map(ledger.bytes_of, inputs))
        end = _end(*[one for one in tree_leaves(result) if one.requires_grad])
        del result
        keeps = any(map(ledger.holds, outputs))
        before = ledger.start_peak()
        with _putting_off(store):
            if end.requires_grad:
                end.backward()  # type: ignore[no-untyped-call]
        backward = ledger.peak - before
        held, weights = _flush(store, ledger, [*parameters, *_floats(leaves)])
    for hook in hooks:
        hook.remove()
    for one in [*parameters, *_floats(leaves)]:
        one.grad = None
    inside = after - output - needed
    return Passed(LayerPass(inside, output, keeps, needed > 0, forward, backward, 0, held, weights), gives)


def _flush(store: Deferred | None, ledger: Ledger, leaves: Sequence[Tensor]) -> tuple[int, int]:
    """Compute gradients that were put off; return what was held for them, and the most that they add."""
    if store is None:
        return 0, 0
    gradients = {key_of(one.grad): one.grad.nbytes for one in leaves if one.grad is not None}
    start = ledger.start_peak()
    held = start - sum(gradients.values())
    store.flush(_KEY)
    return max(held, 0), ledger.peak - start


_KEY = "the one pass"


def _putting_off(store: Deferred | None) -> AbstractContextManager[None]:
    return nullcontext() if store is None else store.putting_off(_KEY)


def _leaf(tensor: Tensor) -> Tensor:
    return faked(tensor).requires_grad_(tensor.is_floating_point())


def _enter(tensor: Tensor) -> Tensor:
    """Return a tensor that is no leaf, which autograd would keep."""
    return tensor.clone() if tensor.is_floating_point() else tensor


def _floats(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor) and one.is_floating_point()]


def _keys(tree: Any) -> list[int]:
    return [key_of(one) for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _hook(parameter: nn.Parameter) -> RemovableHandle:
    """Let a parameter lose its gradient as soon as it has come."""
    register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
    return register(_take_away)


def _take_away(parameter: Tensor) -> None:
    parameter.grad = None


class _End(torch.autograd.Function):
    """Be the end of a pass: keep nothing, and make the gradients when the backward pass asks for them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """Return a number."""
        ctx.specs = [(one.shape, one.dtype, one.device) for one in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return gradients of the tensors' shapes."""
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.specs)


_end: Callable[..., Tensor] = _End.apply
