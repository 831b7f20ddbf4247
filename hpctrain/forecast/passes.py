"""Memory of one layer: its forward and backward pass on fake tensors, with tracked allocations.

Note: a layer in isolation. Its input is not a leaf, so that autograd keeps it only if the layer
needs it. Its output is released, so that only the part that the layer itself keeps remains. The
gradient of its output is created by the backward pass, as in a model. The memory of a sequence of
layers follows from that of its layers, so equal layers run once.
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

from hpctrain.forecast.fake import faked
from hpctrain.forecast.memory_tracker import Ledger, key_of
from hpctrain.parallel.pipeline.split_backward import WeightGradStore

Call = Callable[[Any], Any]


@dataclass(frozen=True)
class LayerPass:
    """Bytes of one forward and backward pass of a layer, without its parameters.

    ``fresh`` is the peak that the backward pass adds if all parameter gradients are kept.
    ``passing`` is the peak if each gradient is removed, or accumulated into an existing one, as
    soon as it is computed. ``held`` is kept for deferred weight gradients, and ``weights`` is the
    peak that those add; both are 0 without deferral.
    """

    inside: int  # saved by autograd, without input and output
    output: int
    keeps_output: bool  # autograd saves the output for this layer
    needs_input: bool
    forward: int  # peak that the forward pass adds, output included
    fresh: int
    passing: int
    held: int = 0
    weights: int = 0


@dataclass(frozen=True)
class Passed:
    """Memory of a layer's passes, and the input of the next layer."""

    found: LayerPass
    gives: Any  # a tensor or a tuple of tensors, on fake memory


def measure(call: Call, given: Any, parameters: Sequence[nn.Parameter], *, splits: bool = False) -> Passed:
    """Measure a layer on a fake input like ``given``; ``splits`` defers weight gradients. Requires ``faking``."""
    kept = _pass(call, given, parameters, takes_away=False, splits=splits)
    away = _pass(call, given, parameters, takes_away=True, splits=splits)
    return replace(kept, found=replace(kept.found, passing=away.found.fresh))


def _pass(call: Call, given: Any, parameters: Sequence[nn.Parameter], *, takes_away: bool, splits: bool) -> Passed:
    leaves = tree_map_only(Tensor, _leaf, given)
    ledger = Ledger(fake=True)
    ledger.ignore([*parameters, *tree_leaves(leaves)])
    store = WeightGradStore() if splits else None
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


def _flush(store: WeightGradStore | None, ledger: Ledger, leaves: Sequence[Tensor]) -> tuple[int, int]:
    """Compute deferred weight gradients; return the bytes that were held for them, and the peak that they add."""
    if store is None:
        return 0, 0
    gradients = {key_of(one.grad): one.grad.nbytes for one in leaves if one.grad is not None}
    start = ledger.start_peak()
    held = start - sum(gradients.values())
    store.flush(_KEY)
    return max(held, 0), ledger.peak - start


_KEY = "the one pass"


def _putting_off(store: WeightGradStore | None) -> AbstractContextManager[None]:
    return nullcontext() if store is None else store.putting_off(_KEY)


def _leaf(tensor: Tensor) -> Tensor:
    return faked(tensor).requires_grad_(tensor.is_floating_point())


def _enter(tensor: Tensor) -> Tensor:
    """Return a non-leaf tensor, as autograd would always keep a leaf."""
    return tensor.clone() if tensor.is_floating_point() else tensor


def _floats(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor) and one.is_floating_point()]


def _keys(tree: Any) -> list[int]:
    return [key_of(one) for one in tree_leaves(tree) if isinstance(one, Tensor)]


def _hook(parameter: nn.Parameter) -> RemovableHandle:
    """Register a hook that clears a parameter's gradient as soon as it is computed."""
    register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
    return register(_take_away)


def _take_away(parameter: Tensor) -> None:
    parameter.grad = None


class _End(torch.autograd.Function):
    """End of a pass: saves no tensors, and creates the output gradients only when the backward pass needs them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        """Return a scalar."""
        ctx.specs = [(one.shape, one.dtype, one.device) for one in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return gradients of the tensors' shapes."""
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.specs)


_end: Callable[..., Tensor] = _End.apply
