"""Stage of a pipeline: passes of its chunks, their random generators, and the parameters that it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.meta_init import REMOVED
from hpctrain.parallel.objective import ONE_TENSOR, flatten, named_leaves, unflatten
from hpctrain.parallel.pipeline.layers import Layer, MicrobatchCall, run_layers, tensors_in
from hpctrain.parallel.pipeline.skip import carried, carrying
from hpctrain.parallel.pipeline.split_backward import backward_from
from hpctrain.parallel.rng import hash32, restored_generators
from hpctrain.shard import Shard, Split, WholeStates

Tensors = tuple[Tensor, ...]
NO_ARGUMENTS = MicrobatchCall(())
CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))

Run = Callable[[Sequence[Layer], Tensors], Any]  # computes other layers and inputs with the same arguments
After = Callable[[Tensors, Tensors, Run], None]  # called with the inputs and outputs of each pass


@dataclass(frozen=True)
class Outputs:
    """Outputs of a chunk: tensors, and the skeleton of the last layer's result, without skip tensors."""

    tensors: Tensors
    structure: Any = ONE_TENSOR


@dataclass(eq=False)
class Chunk:
    """Contiguous layers of a model, with the names of the skip tensors that enter and leave them.

    Chunks exchange flat tuples of tensors: first the tensors that the previous layer returned, then
    the skip tensors in the order of their names (see ``skip.carried``). The receiver must know
    their skeleton.
    """

    layers: Sequence[Layer]
    carried_in: tuple[str, ...]
    carried_out: tuple[str, ...]
    after: After | None = None

    def __call__(self, inputs: Tensors, structure: Any = ONE_TENSOR, call: MicrobatchCall = NO_ARGUMENTS) -> Outputs:
        """Return the outputs of the layers for ``inputs``, then the outgoing skip tensors; integers stay unchanged.

        ``structure`` is the skeleton of the previous chunk's result. ``call`` holds the arguments
        of the model. A chunk without inputs starts from ``call``.
        """
        count = len(inputs) - len(self.carried_in)

        def run(layers: Sequence[Layer], given: Tensors) -> Any:
            return run_layers(layers, call, *([unflatten(structure, given[:count])] if given else ()))

        entered = tuple(as_non_leaf(one) for one in inputs)
        stored = dict(zip(self.carried_in, entered[count:]))
        with carrying(stored):
            x = run(self.layers, entered)
        if sorted(stored) != sorted(self.carried_out):
            raise UsageError(
                f"layers {self.layers[0].name} to {self.layers[-1].name} have kept {sorted(stored)}, expected "
                f"{sorted(self.carried_out)}: every Keep and Join of a layer must run in each pass"
            )
        skeleton, tensors = flatten(x)
        self._check(x, tensors)
        outputs = (*tensors, *(stored[name] for name in self.carried_out))
        if self.after is not None:
            self.after(inputs, outputs, run)
        return Outputs(outputs, skeleton)

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
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:
        return gradients[0]


def as_non_leaf(x: Tensor) -> Tensor:
    """Return a tensor that a layer may change in place, like the result of a previous layer."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    entered: Tensor = _NonLeaf.apply(x)  # type: ignore[no-untyped-call]
    return entered


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set modules to evaluation mode for the ``with`` block: no dropout, and no change of statistics."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, before in training.items():
            module.training = before


# Random numbers of passes ---------------------------------------------------------------------------------------------
#
# Programs seed all ranks alike, which shuffling and initial weights need. The stages would then draw
# the same dropout masks for different layers. The passes of a batch therefore draw from a separate
# stream. Its seed combines the state of the host's generator, a counter, the stage and the data rank
# (Megatron-LM also seeds by the stage). Tensor ranks of one stage draw alike. Afterwards the
# program's own stream is restored, so all ranks continue to draw alike, as in one process.


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


# Parameters of a rank's chunks: removal of those of other stages, and gradient reduction of tied ones -----------------
#
# A removed parameter or buffer becomes None in its module; ``state_dict``, ``parameters()`` and
# ``to()`` skip it. If it was on the meta device, its module remembers it, which takes no memory.
# ``materialise`` then draws the module's initial values as in the whole model, because the values
# that a module draws may depend on what was drawn before.


@dataclass(frozen=True, eq=False)
class TiedParameter:
    """Parameter that several chunks of a model share: all its names, and the chunks that contain one of them."""

    names: tuple[str, ...]
    chunks: tuple[int, ...]


def prune(model: nn.Module, layers: Sequence[Layer], held: Collection[int]) -> None:
    """Remove the parameters and buffers of all layers except the ``held`` ones from their modules, in place.

    Tensors that a held layer shares stay in every module. ``layers`` is the result of
    ``find_layers``.
    """
    kept_ids = {id(tensor) for number in held for tensor in tensors_in(layers[number].module)}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and id(tensor) not in kept_ids:
                if tensor.is_meta:
                    vars(module).setdefault(REMOVED, {})[name] = tensor
                setattr(module, name, None)  # not through the dictionary: recurrent layers keep their own list


def tied_parameters(layers: Sequence[Layer], chunks: Sequence[Collection[int]]) -> list[TiedParameter]:
    """Return the parameters that layers of different chunks share, in the model's order; call it before ``prune``."""
    uses: dict[nn.Parameter, list[tuple[str, int]]] = {}
    home = {number: chunk for chunk, numbers in enumerate(chunks) for number in numbers}
    for number, layer in enumerate(layers):
        for name, parameter in layer.module.named_parameters(layer.name, remove_duplicate=False):
            uses.setdefault(parameter, []).append((name, home[number]))
    found = []
    for used in uses.values():
        within = tuple(sorted({chunk for _, chunk in used}))
        if len(within) > 1:
            found.append(TiedParameter(tuple(name for name, _ in used), within))
    return found


def used_twice(layers: Sequence[Layer]) -> list[nn.Parameter]:
    """Return the parameters that layers hold under several names."""
    counts = Counter(
        parameter for layer in layers for _, parameter in layer.module.named_parameters(remove_duplicate=False)
    )
    return [parameter for parameter, count in counts.items() if count > 1]


class TiedGradients:
    """Tied parameters of this stage, such as an embedding that is also the output layer. Collective over all stages.

    Every stage that holds a tied parameter updates it alike, with the sum of the gradients. The
    copies therefore stay equal bit for bit.
    """

    def __init__(self, model: nn.Module, comm: Communicator, shared: Sequence[TiedParameter]) -> None:
        self._model = model
        self._groups: list[tuple[str, Communicator]] = []
        self._counted_elsewhere: set[str] = set()  # names that an earlier stage counts
        for each in shared:
            owners = sorted({chunk % comm.size for chunk in each.chunks})
            if len(owners) == 1:
                continue
            group = comm.split(0 if comm.rank in owners else 1)
            if comm.rank not in owners:
                continue  # the group remains: all parts of a communicator are divided anew when ranks have died
            self._groups.append((each.names[0], group))
            if comm.rank != each.chunks[0] % comm.size:
                self._counted_elsewhere |= set(each.names)

    def reduce(self) -> None:
        """Sum the gradients of tied parameters over their stages; the gradients must be complete. Collective."""
        for name, group in self._groups:
            parameter = self._model.get_parameter(name)
            if any(group.all_gather_object(parameter.grad is not None)):
                if parameter.grad is None:
                    parameter.grad = parameter.new_zeros(parameter.shape)
                group.all_reduce(parameter.grad)

    def counts(self, name: str) -> bool:
        """Return whether this stage is the one that counts a parameter, where each parameter counts once."""
        return name not in self._counted_elsewhere


class StageSplit:
    """``Split`` of a stage: a tensor shared with an earlier stage is written by that stage.

    If two stages shard a tensor that they share, they may cut it in different places.
    """

    def __init__(self, split: Split, tied: TiedGradients) -> None:
        self._split, self._tied = split, tied

    def shards(self, name: str, tensor: Tensor) -> list[Shard]:
        spare = not self._tied.counts(name)
        return [replace(shard, spare=spare) for shard in self._split.shards(name, tensor)]

    def holds_state(self, optimizer: torch.optim.Optimizer, name: str) -> bool | None:
        return self._split.holds_state(optimizer, name) if isinstance(self._split, WholeStates) else None
