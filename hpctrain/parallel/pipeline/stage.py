"""Forward and backward pass of a chunk (contiguous layers of a model), with its own random generators.

Programs seed all ranks alike, which shuffling and initial weights need. The stages would then draw
the same dropout masks for different layers. The passes of a batch therefore draw from a separate
stream. Its seed combines the state of the host's generator, a counter, the stage and the data rank
(Megatron-LM also seeds by the stage). Tensor ranks of one stage draw alike. Afterwards the
program's own stream is restored, so all ranks continue to draw alike, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hpctrain.errors import UsageError
from hpctrain.parallel.backward_from import backward_from
from hpctrain.parallel.inputs import ONE_TENSOR, flatten, named_leaves, unflatten
from hpctrain.parallel.pipeline.calls import MicrobatchCall, call_layer
from hpctrain.parallel.pipeline.layers import Layer
from hpctrain.parallel.rng import hash32, restored_generators
from hpctrain.parallel.skip import carried, carrying


class PassGenerators:
    """Generators of the host and of ``device`` for passes; ``coordinates`` is the pipeline stage and the data rank."""

    def __init__(self, device: torch.device, coordinates: tuple[int, int]) -> None:
        self._devices = {torch.device("cpu"), device}
        self._coordinates = coordinates
        self._passes, self._last = 0, 0

    @contextmanager
    def own_stream(self) -> Iterator[None]:
        """Draw from this stage's stream in the ``with`` block, from a new one each time."""
        with restored_generators(self._devices) as saved:
            number = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
            # A program that draws nothing between two steps must not get the same masks twice.
            self._passes = self._passes + 1 if number == self._last else 0
            self._last = number
            for generator, _ in saved:
                generator.manual_seed(hash32(number, self._passes, *self._coordinates))
            yield

    def preserved(self) -> AbstractContextManager[object]:
        """Restore the generators after the ``with`` block."""
        return restored_generators(self._devices)


# Forward and backward pass of a chunk (contiguous layers of a model) on tensors from the previous chunk ---------------


Tensors = tuple[Tensor, ...]
CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))

Run = Callable[[Sequence[Layer], Tensors], Any]  # computes other layers and inputs with the same arguments
After = Callable[[Tensors, Tensors, Run], None]  # called with the inputs and outputs of each pass


@dataclass(frozen=True)
class Outputs:
    """Outputs of a chunk: tensors, and the skeleton of the last layer's result, without skip tensors."""

    tensors: Tensors
    structure: Any = ONE_TENSOR


class Chunk:
    """Contiguous layers of a model, with the names of the skip tensors that enter and leave them.

    Chunks exchange flat tuples of tensors: first the tensors that the previous layer returned, then
    the skip tensors in the order of their names (see ``skip.carried``). The receiver must know
    their skeleton.
    """

    def __init__(
        self, layers: Sequence[Layer], carried_in: Sequence[str] = (), carried_out: Sequence[str] = ()
    ) -> None:
        self.layers = tuple(layers)
        self.carried_in = tuple(carried_in)
        self.carried_out = tuple(carried_out)
        self.after: After | None = None

    def forward(self, inputs: Tensors, structure: Any = ONE_TENSOR, call: MicrobatchCall | None = None) -> Outputs:
        """Return the outputs of the layers for ``inputs``, then the outgoing skip tensors; integers stay unchanged.

        ``structure`` is the skeleton of the previous chunk's result. ``call`` holds the arguments
        of the model. A chunk without inputs starts from ``call``.
        """
        count = len(inputs) - len(self.carried_in)
        entered = tuple(as_non_leaf(one) for one in inputs)
        stored = dict(zip(self.carried_in, entered[count:]))
        with carrying(stored):
            x = _run(self.layers, entered[:count], structure, call)
        if sorted(stored) != sorted(self.carried_out):
            raise UsageError(
                f"layers {self._span} have kept {sorted(stored)}, expected {sorted(self.carried_out)}: every Keep and "
                "Join of a layer must run in each pass"
            )
        skeleton, tensors = flatten(x)
        self._check(x, tensors)
        outputs = (*tensors, *(stored[name] for name in self.carried_out))
        if self.after is not None:
            self.after(inputs, outputs, lambda layers, other: _run(layers, other[:count], structure, call))
        return Outputs(outputs, skeleton)

    __call__ = forward

    def _check(self, x: Any, tensors: Tensors) -> None:
        """Raise ``UsageError`` for values that cannot be sent from stage to stage."""
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


def _run(layers: Sequence[Layer], inputs: Tensors, structure: Any, call: MicrobatchCall | None) -> Any:
    """Return the result of layers for the tensors of the previous chunk, or for the arguments of the model."""
    if call is not None and not inputs:
        x, rest = call.call_first(layers[0]), layers[1:]
    else:
        x, rest = unflatten(structure, inputs), layers
    for layer in rest:
        x = call_layer(layer, x, {} if call is None else call.named)
    return x


def make_chunks(layers: Sequence[Layer], cuts: Sequence[range]) -> list[Chunk]:
    """Divide layers into chunks. Raises ``UsageError`` if Keep and Join layers do not match."""
    names = carried(layers)
    return [Chunk([layers[number] for number in cut], names[cut.start], names[cut.stop]) for cut in cuts]


def backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Run a chunk's backward pass: accumulate the gradients of its parameters, and return those of its inputs.

    ``gradients`` has one element per floating-point output. None means the gradient of a loss,
    which is 1. The result has one gradient per input that requires one; inputs are leaves of the
    graph. A gradient is zero if none has arrived.
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


class _NonLeaf(torch.autograd.Function):
    """Autograd node behind a leaf, so that layers may write in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        """Return the same memory."""
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:
        """Pass the gradient on."""
        return gradients[0]


def as_non_leaf(x: Tensor) -> Tensor:
    """Return a tensor that a layer may change in place, like the result of a previous layer."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    entered: Tensor = _NonLeaf.apply(x)  # type: ignore[no-untyped-call]
    return entered
