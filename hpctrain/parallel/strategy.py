"""State what the training loop may ask of a strategy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hpctrain import trace
from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.inputs import Arguments
from hpctrain.parallel.objective import Objective
from hpctrain.parallel.pipeline.skip import carrying
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm
from hpctrain.shard import Split
from hpctrain.transport.single import SingleTransport

if TYPE_CHECKING:
    from hpctrain.parallel.guard.guard import Guard
    from hpctrain.parallel.guard.whole_states import WholeStates

Figures = Mapping[str, float | list[int]]  # numbers by name; a list is a histogram


class Strategy(ABC):
    """Be attached to a module by hooks, and be asked only for what depends on how the ranks share the work.

    Where a method is not abstract, what it does here is right for ranks that hold the whole model.
    """

    model: nn.Module
    comm: Communicator
    place = ""  # where in a mesh this rank is
    stage = 0  # of a pipeline
    pipelined = False  # whether batches go through a pipeline, by forward_backward only
    _syncing = True  # whether backward passes are reduced
    adopts_frozen = False  # whether a parameter that was frozen at first may be trained later
    loose = False  # whether ranks make steps at their own pace between evaluations and checkpoints
    works = True  # whether this rank computes
    met = 0  # meetings that this rank has been to
    updates_itself = False  # whether an update of the optimizer that is under way is one of the strategy's own
    held: Mapping[int, nn.Parameter] | None = None  # the trained parameters when it was attached, by id; None: unknown
    _sample_weight = 1.0  # local samples x data ranks / global samples
    guards: ClassVar[WeakSet[Strategy]] = WeakSet()  # strategies whose parameters are guarded
    guard: Guard | None = None
    whole_states: WholeStates | None = None
    guarded: Mapping[str, nn.Parameter] = MappingProxyType({})  # by name
    _local_weight: float | None = None  # sample weight of gradients that wait on this rank alone; None: there are none

    @property
    def pipe(self) -> Communicator:
        """Return the stages of this rank's pipeline: itself where there is none."""
        return Communicator(SingleTransport())

    @property
    def data(self) -> Communicator:
        """Return the ranks that share out the samples of a batch: each of them gets its own."""
        return self.comm

    # Passes -----------------------------------------------------------------------------------------------------------

    def forward_backward(self, inputs: Any, targets: Any, objective: Objective, *, weight: float = 1.0) -> Tensor:
        """Leave the gradients of weight x loss in the parameters; return that loss, a scalar, without a graph.

        ``inputs`` is a tensor, a tuple or list of positional arguments, or a dict of keyword arguments of the model.
        The loss is that of this data rank's samples; it is not averaged over the data ranks, as the gradients are. A
        call by all ranks that hold parts of one replica, with the same samples; all of them get the same loss.
        """
        arguments = Arguments.of(inputs)
        with trace.span("forward"), carrying({}), objective.computing(arguments.device):
            outputs = arguments.call(self.model)
        with trace.span("loss"):
            loss = objective.compare(outputs, targets) * weight
        with trace.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def measure(self, inputs: Any, targets: Any, objective: Objective) -> Tensor:
        """Return the loss of this data rank's samples, a scalar; a call as ``forward_backward`` is."""
        arguments = Arguments.of(inputs)
        with objective.computing(arguments.device):
            outputs = arguments.call(self.model)
        return objective.compare(outputs, targets)

    def skip_checks(self) -> None:
        """Leave out the checks of the first step."""

    @contextmanager
    def many_passes(self, *, reduces: bool = True) -> Iterator[None]:
        """Keep parameters whole and gradients local for any forward and backward passes of parts of the model.

        When the ``with`` block ends the gradients are averaged, all at once, if it ``reduces`` any. A call by all ranks
        of ``data``.
        """
        if reduces:
            raise UsageError(f"{type(self).__name__} cannot train a model in parts", everywhere=True)
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate on each rank alone, and whole, for backward passes inside the ``with`` block."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @abstractmethod
    def contribute_nothing(self, *, backward: bool = True) -> None:
        """Take part in a forward (and ``backward``) pass of the others, with no sample of one's own."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``; return the norm before, a scalar."""

    @abstractmethod
    def detach(self) -> None:
        """Take all hooks off the module."""

    # Shares of a batch ------------------------------------------------------------------------------------------------

    @property
    def sample_weight(self) -> float:
        """Return what this rank's gradients count with in the average over the data ranks."""
        return self._sample_weight

    def set_sample_weight(self, weight: float) -> None:
        """Let this rank's gradients count with ``weight`` in the average over the data ranks, until set again.

        ``weight`` is local samples x data ranks / global samples: then the average of the gradients of each rank's mean
        loss is the gradient of the mean loss of all samples. It is 1 if the ranks hold equally many samples, and 0 for
        a rank that computes on a stand-in sample. Asynchronous strategies ignore it.
        """
        if not 0 <= weight < math.inf:
            raise UsageError(
                f"invalid sample weight: {weight}; allowed is a finite number of at least 0; pass local samples x data "
                "ranks / global samples"
            )
        if weight == self._sample_weight:
            return
        self._sample_weight = float(weight)
        for module in self.model.modules():
            if isinstance(module, SyncBatchNorm):
                module.sample_weight = self._sample_weight

    def _note_local(self) -> None:
        """Take note that a backward pass leaves gradients on this rank alone."""
        self._local_weight = self._sample_weight

    def _check_local(self) -> None:
        """Raise ``UsageError`` if gradients that wait on this rank alone were computed at another sample weight.

        A call before each pass that adds to them or reduces them: one factor is applied to their sum.
        """
        if self._local_weight is None or self._local_weight == self._sample_weight:
            return
        if any(bool(numbers(gradient).any()) for _, gradient in self.local_gradients()):
            raise UsageError(
                f"cannot add gradients of sample weight {self._sample_weight:g} to those that no_sync has accumulated "
                f"at {self._local_weight:g}; the batches of one update must be divided over the ranks alike; "
                "write run.backward(batch, compute, accumulate=n)"
            )
        self._local_weight = None  # they were dropped

    # How the model is split -------------------------------------------------------------------------------------------

    @property
    def split(self) -> Split | None:
        """Return how the model's tensors are split over the ranks, for checkpoints; None where they are not."""
        return None

    def whole_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor of which this rank holds a part; None if it holds all of it."""
        return None

    @property
    def reduces_early(self) -> bool:
        """Tell whether each backward pass of a step should be reduced by itself, as whole gradients have no room."""
        return False

    @contextmanager
    def summon(self, *, write: bool = False) -> Iterator[None]:
        """Put the whole parameters into the model for the ``with`` block; a call by all ranks.

        What is changed there counts only with ``write``, and then what rank 0 has written.
        """
        yield

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` where an optimizer cannot update what this rank holds."""

    def refresh(self) -> None:
        """Take note that parameters were changed by other hands than the optimizer's; a call by all ranks."""

    def agree_on_generators(self) -> None:
        """Let ranks draw alike that must (torch's generators), after these were set; a call by all ranks."""

    def reduced_gradients(self) -> list[tuple[str, Tensor]]:
        """Return what this rank holds of the averaged gradients, by name."""
        return [(name, each.grad) for name, each in trainable(self.model) if each.grad is not None]

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply what this rank holds of the averaged gradients by a factor, a scalar."""
        gradients = [gradient for _, gradient in self.reduced_gradients()]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def update_early(self, optimizer: torch.optim.Optimizer) -> None:
        """Promise that updates need no look at the gradients, and that ``announce_update`` comes before each last pass.

        Hyperparameters are those of the time of that pass.
        """

    def announce_update(self) -> None:
        """Say that the backward pass that comes is the last before an update."""

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Have in the model, for the ``with`` block, what all ranks have come to: for evaluations and checkpoints.

        A call by all ranks.
        """
        yield

    def figures(self) -> Figures:
        """Return numbers of all ranks together that are worth a curve; a call by all of them."""
        return {}

    def own_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the tensors in which this rank differs from the others beyond ``split``, to be saved and filled."""
        return {}

    def settle(self) -> None:
        """End what goes on beside the steps, so that parameters and states may be read; a call by all ranks."""

    def conclude(self) -> None:
        """Leave in the model, on every rank, what all ranks have trained together. Collective; a run ends by it."""

    @property
    def replica(self) -> Communicator | None:
        """Return the ranks that hold the averaged gradients together; None where each holds all of them."""
        return None

    @property
    def copies(self) -> Communicator | None:
        """Return the ranks that must hold the same parameters as this one after an update; None if there are none."""
        return None

    # Parameters of which this rank holds a part -----------------------------------------------------------------------

    def partial_parameters(self) -> tuple[str, Mapping[str, nn.Parameter], bool]:
        """Return what this rank's parameters are parts of, those that are, by name, and whether passes use them."""
        return "", {}, False

    def protect(self) -> None:
        """Let functions that would need the other ranks' parts of the parameters raise ``UsageError``."""
        from hpctrain.parallel.guard.guard import Guard
        from hpctrain.parallel.guard.whole_states import WholeStates

        what, parameters, in_passes = self.partial_parameters()
        if parameters:
            self.guarded = dict(parameters)
            self.guard = Guard(self, parameters, what, in_passes=in_passes)
            self.whole_states = WholeStates(self)
            Strategy.guards.add(self)

    def unprotect(self) -> None:
        """Let the parameters be plain ones again."""
        if self.guard is not None:
            self.guard.close()
            if self.whole_states is not None:
                self.whole_states.close()
            self.guard, self.guarded = None, {}
            Strategy.guards.discard(self)

    def unguarded(self) -> AbstractContextManager[None]:
        """Return a ``with`` block in which the parameters are plain ones."""
        return nullcontext() if self.guard is None else self.guard.off()

    def norm_groups(self) -> list[Communicator]:
        """Return the groups of ranks over which sums over this rank's parts are to be reduced, in this order."""
        return [] if self.replica is None else [self.replica]

    def counts(self, name: str) -> bool:
        """Tell whether this rank is the one to count a parameter, of all that hold the same elements of it."""
        return True

    def before_write(self) -> None:
        """Take note that the program is about to change guarded parameters itself; a call by all ranks."""

    def gradients_final(self) -> None:
        """Apply to the gradients what waits for their next use."""

    # Gradients before they are reduced --------------------------------------------------------------------------------

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients that backward passes under ``no_sync`` have left on this rank alone, by name."""
        for name, parameter in trainable(self.model):
            if parameter.grad is not None:
                yield name, parameter.grad

    def average_gradients(self) -> None:
        """Average over the data ranks the gradients that the program has set itself. Collective."""
        if self.comm.size > 1:
            raise UsageError(
                f"average_gradients under {type(self).__name__}: allowed is parallel.data = 'ddp'; call "
                "loss.backward(), which leaves averaged gradients",
                everywhere=True,
            )

    def drop_gradients(self) -> None:
        """Forget all gradients, reduced or not."""
        for _, parameter in trainable(self.model):
            parameter.grad = None
        self._local_weight = None


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that get gradients, each once, under the first of its names."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def clip_whole_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Clip gradients that this rank holds in full; return their norm before.

    Where the norm is not finite they stay as they are: scaling would spread NaN over all of them, and hide where it
    came from.
    """
    dense = [parameter for _, parameter in trainable(model) if parameter.grad is not None]
    sparse = []
    for parameter in list(dense):
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # a row may have been looked up more than once
            sparse.append(numbers(parameter.grad))
            dense = [one for one in dense if one is not parameter]
    norm = torch.nn.utils.get_total_norm([*(one.grad for one in dense if one.grad is not None), *sparse])
    if math.isfinite(max_norm) and bool(torch.isfinite(norm)):
        torch.nn.utils.clip_grads_with_norm_(dense, max_norm, norm)
        for values in sparse:
            values.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(values.device))  # as that does
    return norm


def numbers(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient, each once: of a sparse one those of the rows that it has."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
