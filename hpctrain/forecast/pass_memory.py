"""Memory of forward and backward passes: measured per layer on fake tensors, simulated for sequences of layers.

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
from torch.utils.hooks import RemovableHandle

from hpctrain.forecast.fake_tensors import MemoryTracker, storage_key, to_fake
from hpctrain.parallel.objective import map_leaves, tensors_of
from hpctrain.parallel.pipeline.split_backward import WeightGradStore

Call = Callable[[Any], Any]


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one forward and backward pass of a layer, without its parameters.

    ``backward`` is the peak that the backward pass adds if all parameter gradients are kept.
    ``backward_in_place`` is the peak if each gradient is removed, or accumulated into an existing
    one, as soon as it is computed. ``deferred`` is kept for deferred weight gradients, and
    ``weight_grads`` is the peak that those add; both are 0 without deferral.
    """

    saved: int  # saved by autograd, without input and output
    output: int
    keeps_output: bool  # autograd saves the output for this layer
    needs_input: bool
    forward: int  # peak that the forward pass adds, output included
    backward: int
    backward_in_place: int
    deferred: int = 0
    weight_grads: int = 0


@dataclass(frozen=True)
class MeasuredLayer:
    """Memory of a layer's passes, and the input of the next layer."""

    memory: LayerMemory
    next_input: Any  # a tensor or a tuple of tensors, on fake memory


def measure(
    call: Call, given: Any, parameters: Sequence[nn.Parameter], *, split_backward: bool = False
) -> MeasuredLayer:
    """Measure a layer on a fake input like ``given``, in ``fake_mode``; ``split_backward`` defers weight gradients."""
    kept = _pass(call, given, parameters, frees_grads=False, split_backward=split_backward)
    freed = _pass(call, given, parameters, frees_grads=True, split_backward=split_backward)
    return replace(kept, memory=replace(kept.memory, backward_in_place=freed.memory.backward))


def _pass(
    call: Call, given: Any, parameters: Sequence[nn.Parameter], *, frees_grads: bool, split_backward: bool
) -> MeasuredLayer:
    leaves = map_leaves(given, _leaf)
    tracker = MemoryTracker(fake=True)
    tracker.ignore([*parameters, *tensors_of(leaves)])
    store = WeightGradStore() if split_backward else None
    register: Callable[..., RemovableHandle] = nn.Parameter.register_post_accumulate_grad_hook
    hooks = [register(one, _free_grad) for one in parameters if frees_grads]
    with tracker:
        non_leaves = map_leaves(leaves, _as_non_leaf)
        input_keys = _keys(non_leaves)
        start = tracker.start_peak()
        with _deferring(store):
            result = call(non_leaves)
        forward = tracker.peak - start
        next_input, outputs = map_leaves(result, to_fake), set(_keys(result)) - set(input_keys)
        del non_leaves
        after, output = tracker.live, sum(map(tracker.bytes_of, outputs))
        needed = sum(map(tracker.bytes_of, input_keys))
        end = _end(*[one for one in tensors_of(result) if one.requires_grad])
        del result
        keeps = any(map(tracker.is_live, outputs))
        before = tracker.start_peak()
        with _deferring(store):
            if end.requires_grad:
                end.backward()  # type: ignore[no-untyped-call]
        backward = tracker.peak - before
        deferred, weight_grads = _flush(store, tracker, [*parameters, *_floats(leaves)])
    for hook in hooks:
        hook.remove()
    for one in [*parameters, *_floats(leaves)]:
        one.grad = None
    saved = after - output - needed
    return MeasuredLayer(
        LayerMemory(saved, output, keeps, needed > 0, forward, backward, 0, deferred, weight_grads), next_input
    )


def _flush(store: WeightGradStore | None, tracker: MemoryTracker, leaves: Sequence[Tensor]) -> tuple[int, int]:
    """Compute deferred weight gradients; return the bytes that were kept for them, and the peak that they add."""
    if store is None:
        return 0, 0
    gradients = {storage_key(one.grad): one.grad.nbytes for one in leaves if one.grad is not None}
    start = tracker.start_peak()
    deferred = start - sum(gradients.values())
    store.flush(_KEY)
    return max(deferred, 0), tracker.peak - start


_KEY = "the one pass"


def _deferring(store: WeightGradStore | None) -> AbstractContextManager[None]:
    return nullcontext() if store is None else store.deferring(_KEY)


def _leaf(tensor: Tensor) -> Tensor:
    return to_fake(tensor).requires_grad_(tensor.is_floating_point())


def _as_non_leaf(tensor: Tensor) -> Tensor:
    """Return a non-leaf tensor, as autograd would always keep a leaf."""
    return tensor.clone() if tensor.is_floating_point() else tensor


def _floats(tree: Any) -> list[Tensor]:
    return [one for one in tensors_of(tree) if one.is_floating_point()]


def _keys(tree: Any) -> list[int]:
    return [storage_key(one) for one in tensors_of(tree)]


def _free_grad(parameter: Tensor) -> None:
    """Clear a parameter's gradient as soon as it is computed."""
    parameter.grad = None


class _End(torch.autograd.Function):
    """End of a pass: saves no tensors, and creates the output gradients only when the backward pass needs them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.specs = [(one.shape, one.dtype, one.device) for one in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.specs)


_end: Callable[..., Tensor] = _End.apply


# Simulated memory of the passes of a sequence of layers: pure arithmetic on the memory of each layer ------------------


@dataclass(frozen=True)
class MemoryEvent:
    """Memory event: bytes at one moment of a step, in addition to persistent memory."""

    when: str
    activations: int = 0
    gradients: int = 0
    gathered: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.gathered + self.temporary


@dataclass(frozen=True)
class SequenceLayer:
    """Layer of a sequence: the memory of its passes, its gradients by name, and the strategy's bytes in each pass."""

    name: str
    memory: LayerMemory
    gradients: dict[str, int]
    gathered: int = 0  # in the forward pass
    gathered_backward: int = 0
    offloaded: bool = False  # its input is offloaded to the host until the backward pass


@dataclass(frozen=True)
class PassMemory:
    """Bytes saved between the forward and the backward pass of a sequence, and the memory events of both passes.

    The events exclude activations that were saved, and gradients that existed, before the pass
    began.
    """

    saved: int
    offloaded: int  # saved bytes that are offloaded to the host
    forward: list[MemoryEvent]
    backward: list[MemoryEvent]  # of the backward pass, if all parameter gradients are kept
    backward_in_place: list[MemoryEvent]  # of the backward pass, if gradients are removed or accumulated at once
    deferred: int  # bytes kept for deferred weight gradients
    weight_grads: list[MemoryEvent]  # while deferred weight gradients are computed


def simulate_passes(
    steps: Sequence[SequenceLayer], loss: LayerMemory | None, *, keep_outputs: bool, at_loss: int = 0
) -> PassMemory:
    """Simulate a sequence that ends in ``loss``, if any; ``keep_outputs``: its outputs live until backward ends.

    ``at_loss`` are bytes that the strategy has between the passes.
    """
    layers = [*steps, SequenceLayer("loss", loss, {}, at_loss, at_loss)] if loss is not None else list(steps)
    last = len(steps) - 1  # index of the layer whose outputs are kept
    live = offloaded = 0
    forward = []
    output_saved = [_output_saved(layers, index) or keep_outputs and index == last for index in range(len(layers))]
    for index, step in enumerate(layers):
        forward.append(MemoryEvent(f"forward of {step.name}", live, 0, step.gathered, step.memory.forward))
        if index:
            before = layers[index - 1].memory.output
            if not output_saved[index - 1]:
                live -= before
            elif step.offloaded:
                live, offloaded = live - before, offloaded + before
        live += step.memory.saved + step.memory.output
    if not keep_outputs and loss is None and not layers[-1].memory.keeps_output:
        live -= layers[-1].memory.output
    weight_grads = [
        MemoryEvent(f"weights of {step.name}", temporary=step.memory.weight_grads)
        for step in layers
        if step.memory.weight_grads  # computed from the values that are kept for them
    ]
    return PassMemory(
        live,
        offloaded,
        forward,
        _backward(layers, live, output_saved, last if keep_outputs else -1, new_gradients=True),
        _backward(layers, live, output_saved, last if keep_outputs else -1, new_gradients=False),
        sum(step.memory.deferred for step in layers),
        weight_grads,
    )


def _output_saved(layers: Sequence[SequenceLayer], index: int) -> bool:
    """Return whether autograd keeps the output of a layer."""
    return layers[index].memory.keeps_output or index + 1 < len(layers) and layers[index + 1].memory.needs_input


def _backward(
    layers: Sequence[SequenceLayer], live: int, output_saved: Sequence[bool], last_output: int, *, new_gradients: bool
) -> list[MemoryEvent]:
    """Return the memory events of the backward pass; the output of layer ``last_output`` is live until its end."""
    events = []
    gradients: dict[str, int] = {}
    for index in reversed(range(len(layers))):
        step = layers[index]
        found = step.memory
        new = new_gradients and not step.gradients.keys() <= gradients.keys()
        if step.offloaded and index:
            live += layers[index - 1].memory.output  # it has been copied back to the device
        temporary = found.backward if new else found.backward_in_place
        if index > 1 and layers[index - 1].offloaded:
            temporary += layers[index - 2].memory.output  # prefetched meanwhile
        held = sum(gradients.values())
        events.append(MemoryEvent(f"backward of {step.name}", live, held, step.gathered_backward, temporary))
        if new_gradients:
            gradients.update(step.gradients)
        live -= found.saved
        if found.keeps_output and index != last_output:
            live -= found.output
        if index and output_saved[index - 1] and not layers[index - 1].memory.keeps_output and index - 1 != last_output:
            live -= layers[index - 1].memory.output
    return events
