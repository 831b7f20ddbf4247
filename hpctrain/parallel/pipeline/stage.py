"""Run some layers of a row as one chunk, forward and backward, on tensors that came from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.backward_from import backward_from
from hpctrain.parallel.pipeline.layers import Layer
from hpctrain.parallel.pipeline.skip import carried, carrying

Tensors = tuple[Tensor, ...]


class Chunk:
    """Hold contiguous layers of a row, and the names of tensors that are carried into the first and out of the last.

    What travels between chunks is flat: what the layer before returned, then what is carried, in the order of the
    names (``skip.carried`` gives them). A layer that returns a tuple hands one tuple to the next, which must be known
    on the other side: ``gives_tuple`` tells after a forward pass, ``takes_tuple`` is set from that of the chunk before.
    """

    def __init__(
        self, layers: Sequence[Layer], carried_in: Sequence[str] = (), carried_out: Sequence[str] = ()
    ) -> None:
        self.layers = tuple(layers)
        self.carried_in = tuple(carried_in)
        self.carried_out = tuple(carried_out)
        self.takes_tuple = False
        self.gives_tuple = False

    def forward(self, inputs: Tensors) -> Tensors:
        """Return what the layers make of ``inputs``, then what is carried on; tensors only, integers as they are."""
        own = len(inputs) - len(self.carried_in)
        entered = tuple(enter(one) for one in inputs)
        x: Any = entered[:own] if self.takes_tuple else entered[0]
        kept = dict(zip(self.carried_in, entered[own:]))
        with carrying(kept):
            for layer in self.layers:
                x = layer.module(x)
        if sorted(kept) != sorted(self.carried_out):
            raise UsageError(
                f"layers {self._span} have kept {sorted(kept)}, expected {sorted(self.carried_out)}: every Keep and "
                "Join of a layer must run in each pass"
            )
        self.gives_tuple = not isinstance(x, Tensor)
        return (*self._flat(x), *(kept[name] for name in self.carried_out))

    __call__ = forward

    def _flat(self, x: Any) -> Tensors:
        if isinstance(x, Tensor):
            return (x,)
        if type(x) is tuple and all(isinstance(one, Tensor) for one in x):
            return x
        what = f"tuple of {', '.join(type(one).__name__ for one in x)}" if type(x) is tuple else type(x).__name__
        raise UsageError(
            f"layer {self.layers[-1].name} returned a {what}, after which the model cannot be cut: what goes from "
            "stage to stage is a tensor or a flat tuple of tensors"
        )

    @property
    def _span(self) -> str:
        return f"{self.layers[0].name} to {self.layers[-1].name}"


def make_chunks(layers: Sequence[Layer], cuts: Sequence[range]) -> list[Chunk]:
    """Cut a row of layers into chunks; raise ``UsageError`` where what is kept and what is joined do not fit."""
    names = carried(layers)
    return [Chunk([layers[number] for number in cut], names[cut.start], names[cut.stop]) for cut in cuts]


def backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Take a chunk's backward pass: add to its parameters' gradients, and return those of its inputs.

    ``gradients`` has one for each floating-point output; None stands for that of a loss, which is 1. One is returned
    for each input that requires a gradient: inputs are leaves of the graph. It is zero where none has come.
    """
    floating = [output for output in outputs if output.is_floating_point()]
    given = [torch.ones_like(one) for one in floating] if gradients is None else gradients
    pairs = [pair for pair in zip(floating, given, strict=True) if pair[0].requires_grad]
    if pairs:
        backward_from([output for output, _ in pairs], [gradient for _, gradient in pairs])
    found = []
    for one in inputs:
        if one.requires_grad:
            found.append(torch.zeros_like(one) if one.grad is None else one.grad)
            one.grad = None
    return tuple(found)


class _Enter(torch.autograd.Function):
    """Give a leaf a node of its own, behind which layers may write in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        """Return the same memory."""
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:
        """Pass the gradient on."""
        return gradients[0]


def enter(x: Tensor) -> Tensor:
    """Return a tensor that a layer may change in place, as it may what the layer before it returned."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    entered: Tensor = _Enter.apply(x)  # type: ignore[no-untyped-call]
    return entered
