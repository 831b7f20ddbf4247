"""Run some layers of a row as one chunk, forward and backward, on tensors that came from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hpctrain.errors import UsageError
from hpctrain.parallel.nest import ONE_TENSOR, named_leaves, put_together, take_apart
from hpctrain.parallel.pipeline.backward_from import backward_from
from hpctrain.parallel.pipeline.calls import Call, call_layer
from hpctrain.parallel.pipeline.layers import Layer
from hpctrain.parallel.pipeline.skip import carried, carrying

Tensors = tuple[Tensor, ...]
CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))

Run = Callable[[Sequence[Layer], Tensors], Any]  # what other layers make of other inputs of a pass
After = Callable[[Tensors, Tensors, Run], None]  # called with inputs and outputs of each pass


@dataclass(frozen=True)
class Outputs:
    """What a chunk gives: tensors, and the skeleton of what its last layer returned, without what is carried."""

    tensors: Tensors
    structure: Any = ONE_TENSOR


class Chunk:
    """Contiguous layers of a row, with the names of tensors that are carried into the first and out of the last.

    What travels between chunks is flat: the tensors of what the layer before returned, then what is carried, in the
    order of the names (``skip.carried`` gives them). Their skeleton must be known on the other side.
    """

    def __init__(
        self, layers: Sequence[Layer], carried_in: Sequence[str] = (), carried_out: Sequence[str] = ()
    ) -> None:
        self.layers = tuple(layers)
        self.carried_in = tuple(carried_in)
        self.carried_out = tuple(carried_out)
        self.after: After | None = None

    def forward(self, inputs: Tensors, structure: Any = ONE_TENSOR, call: Call | None = None) -> Outputs:
        """Return what the layers make of ``inputs``, then what is carried on; integers stay as they are.

        ``structure`` is the skeleton of what the chunk before gave. ``call`` holds the arguments of the model; a chunk
        without inputs begins with it.
        """
        own = len(inputs) - len(self.carried_in)
        entered = tuple(enter(one) for one in inputs)
        kept = dict(zip(self.carried_in, entered[own:]))
        with carrying(kept):
            x = _run(self.layers, entered[:own], structure, call)
        if sorted(kept) != sorted(self.carried_out):
            raise UsageError(
                f"layers {self._span} have kept {sorted(kept)}, expected {sorted(self.carried_out)}: every Keep and "
                "Join of a layer must run in each pass"
            )
        skeleton, tensors = take_apart(x)
        self._check(x, tensors)
        outputs = (*tensors, *(kept[name] for name in self.carried_out))
        if self.after is not None:
            self.after(inputs, outputs, lambda layers, other: _run(layers, other[:own], structure, call))
        return Outputs(outputs, skeleton)

    __call__ = forward

    def _check(self, x: Any, tensors: Tensors) -> None:
        """Raise ``UsageError`` for what cannot be sent from stage to stage."""
        last = self.layers[-1].name
        for name, leaf in named_leaves(x, "output"):
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise UsageError(
                    f"layer {last} returned {name} of type {type(leaf).__name__}, after which the model cannot be cut; "
                    "what goes from stage to stage are tensors, None, bools, numbers, strings and dtypes, and tuples, "
                    "lists, dicts and dataclasses of these"
                )
        if not tensors:
            raise UsageError(f"layer {last} returned no tensor, after which the model cannot be cut: return one")

    @property
    def _span(self) -> str:
        return f"{self.layers[0].name} to {self.layers[-1].name}"


def _run(layers: Sequence[Layer], inputs: Tensors, structure: Any, call: Call | None) -> Any:
    """Return what layers make of what the chunk before gave, or of the arguments of the model."""
    if call is not None and not inputs:
        x, rest = call.first(layers[0]), layers[1:]
    else:
        x, rest = put_together(structure, inputs), layers
    for layer in rest:
        x = call_layer(layer, x, {} if call is None else call.named)
    return x


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
