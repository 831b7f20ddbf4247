"""Interface between the training loop and a parallel strategy."""

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
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.single import SingleTransport
from hpctrain.errors import UsageError
from hpctrain.parallel.inputs import CallArguments
from hpctrain.parallel.objective import Objective
from hpctrain.parallel.pipeline.skip import carrying
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm
from hpctrain.shard import Split

if TYPE_CHECKING:
    from hpctrain.parallel.guard.guard import ParameterGuard, WholeStates

Metrics = Mapping[str, float | list[int]]  # numbers by name; a list is a histogram


class Strategy(ABC):
    """Base class of strategies, which are attached to a module by hooks and distribute its training over the ranks.

    The default implementations are correct for ranks that hold the whole model.
    """

    model: nn.Module
    comm: Communicator
    place = ""  # coordinates of this rank in the mesh, as text
    stage = 0  # pipeline stage
    pipelined = False  # whether batches go through a pipeline, which forward_backward executes
    _syncing = True  # whether backward passes are reduced
    adopts_frozen = False  # whether an initially frozen parameter may be trained later
    asynchronous = False  # whether ranks step asynchronously between evaluations and checkpoints
    computes = True  # whether this rank computes
    sync_count = 0  # number of synchronisations that this rank has joined
    updates_itself = False  # whether the optimizer update in progress was started by the strategy
    held: Mapping[int, nn.Parameter] | None = None  # parameters trained at attachment, by id; None: unknown
    _sample_weight = 1.0  # local samples x data ranks / global samples
    guards: ClassVar[WeakSet[Strategy]] = WeakSet()  # strategies whose parameters are guarded
    guard: ParameterGuard | None = None
    whole_states: WholeStates | None = None
    guarded: Mapping[str, nn.Parameter] = MappingProxyType({})  # by name
    _local_weight: float | None = None  # sample weight of unreduced local gradients; None: no such gradients

    @property
    def pipe(self) -> Communicator:
        """Return the stages of this rank's pipeline; only this rank if there is no pipeline."""
        return Communicator(SingleTransport())

    @property
    def data(self) -> Communicator:
        """Return the ranks that divide the samples of a batch; each of them gets different ones."""
        return self.comm

    # Passes -----------------------------------------------------------------------------------------------------------

    def forward_backward(self, inputs: Any, targets: Any, objective: Objective, *, weight: float = 1.0) -> Tensor:
        """Add the gradients of weight x loss to the parameters; return that loss, a scalar, without a graph.

        ``inputs`` is a tensor, a tuple or list of positional arguments, or a dict of keyword
        arguments of the model. The loss is that of this data rank's samples. Unlike the gradients,
        it is not averaged over the data ranks. Collective over the ranks that hold parts of one
        replica: they pass the same samples and get the same loss.
        """
        arguments = CallArguments.of(inputs)
        with trace.span("forward"), carrying({}), objective.computing(arguments.device):
            outputs = arguments.call(self.model)
        with trace.span("loss"):
            loss = objective.compare(outputs, targets) * weight
        with trace.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def measure(self, inputs: Any, targets: Any, objective: Objective) -> Tensor:
        """Return the loss of this data rank's samples, a scalar; collective as ``forward_backward``."""
        arguments = CallArguments.of(inputs)
        with objective.computing(arguments.device):
            outputs = arguments.call(self.model)
        return objective.compare(outputs, targets)

    def skip_checks(self) -> None:
        """Disable the checks of the first step."""

    @contextmanager
    def deferred_reduction(self, *, reduces: bool = True) -> Iterator[None]:
        """Keep parameters unsharded and gradients local for any forward and backward passes of parts of the model.

        At the end of the ``with`` block all gradients are averaged at once, if it ``reduces`` them.
        Collective over the ranks of ``data``.
        """
        if reduces:
            raise UsageError(f"{type(self).__name__} cannot train a model in parts", everywhere=True)
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let whole gradients accumulate locally for backward passes inside the ``with`` block."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @abstractmethod
    def join_empty(self, *, backward: bool = True) -> None:
        """Join a forward (and ``backward``) pass of the other ranks without a sample on this rank. Collective."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``; return the norm before, a scalar."""

    @abstractmethod
    def detach(self) -> None:
        """Remove all hooks from the module."""

    # Shares of a batch ------------------------------------------------------------------------------------------------

    @property
    def sample_weight(self) -> float:
        """Return the weight of this rank's gradients in the average over the data ranks."""
        return self._sample_weight

    def set_sample_weight(self, weight: float) -> None:
        """Set the weight of this rank's gradients in the average over the data ranks, until set again.

        ``weight`` is local samples x data ranks / global samples. With this weight, the average of
        the gradients of each rank's mean loss is the gradient of the mean loss of all samples. It
        is 1 if all ranks have equally many samples, and 0 for a rank that computes on a placeholder
        sample. Asynchronous strategies ignore it.
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

    def _record_local_gradients(self) -> None:
        """Record that a backward pass leaves unreduced gradients on this rank."""
        self._local_weight = self._sample_weight

    def _check_local_gradients(self) -> None:
        """Raise ``UsageError`` if unreduced local gradients were computed with another sample weight.

        Called before each pass that adds to them or reduces them, because one factor is applied to
        their sum.
        """
        if self._local_weight is None or self._local_weight == self._sample_weight:
            return
        if any(bool(element_values(gradient).any()) for _, gradient in self.local_gradients()):
            raise UsageError(
                f"cannot add gradients of sample weight {self._sample_weight:g} to those that no_sync has accumulated "
                f"at {self._local_weight:g}; the batches of one update must be divided over the ranks alike; "
                "write run.backward(batch, compute, accumulate=n)"
            )
        self._local_weight = None  # they were dropped

    # Layout of the split model ----------------------------------------------------------------------------------------

    @property
    def split(self) -> Split | None:
        """Return how the model's tensors are split over the ranks, for checkpoints; None if they are not split."""
        return None

    def whole_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor if this rank holds a part of it; None if it holds all of it."""
        return None

    @property
    def reduces_early(self) -> bool:
        """Return whether to reduce each backward pass of a step, because whole gradients do not fit in memory."""
        return False

    @contextmanager
    def unshard(self, *, write: bool = False) -> Iterator[None]:
        """Unshard the parameters of the model for the ``with`` block. Collective.

        Changes are discarded unless ``write`` is true; in that case the values of rank 0 are kept.
        """
        yield

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` if an optimizer cannot update this rank's parameters."""

    def refresh(self) -> None:
        """Synchronise after a change of parameters other than by the optimizer. Collective."""

    def agree_on_generators(self) -> None:
        """Make the ranks that must draw the same numbers agree, after torch's generators were set. Collective."""

    def reduced_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's part of the averaged gradients, by name."""
        return [(name, each.grad) for name, each in trainable(self.model) if each.grad is not None]

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply this rank's part of the averaged gradients by a factor, a scalar."""
        gradients = [gradient for _, gradient in self.reduced_gradients()]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def update_early(self, optimizer: torch.optim.Optimizer) -> None:
        """Allow updates within the backward pass; ``announce_update`` must precede the last pass before each update.

        The caller guarantees that updates do not depend on an inspection of the gradients. The
        hyperparameters are those at the time of that pass.
        """

    def announce_update(self) -> None:
        """Announce that the next backward pass is the last before an update."""

    @contextmanager
    def consensus_view(self) -> Iterator[None]:
        """Load the consensus state of all ranks into the model for the ``with`` block, for evaluations and checkpoints.

        Collective.
        """
        yield

    def metrics(self) -> Metrics:
        """Return metrics over all ranks, for plots. Collective."""
        return {}

    def rank_local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the rank-local tensors beyond ``split``, for saving and for loading in place."""
        return {}

    def drain(self) -> None:
        """Complete background work, so that parameters and states may be read. Collective."""

    def conclude(self) -> None:
        """Store the jointly trained parameters in the model on every rank, at the end of a run. Collective."""

    @property
    def replica(self) -> Communicator | None:
        """Return the ranks that together hold the averaged gradients; None if each rank holds all of them."""
        return None

    @property
    def copies(self) -> Communicator | None:
        """Return the ranks that must hold the same parameters as this one after an update; None if there are none."""
        return None

    # Partial parameters -----------------------------------------------------------------------------------------------

    def partial_parameters(self) -> tuple[str, Mapping[str, nn.Parameter], bool]:
        """Return a description of this rank's partial parameters, these by name, and whether passes use them."""
        return "", {}, False

    def unprotect(self) -> None:
        """Make the parameters ordinary ones again."""
        if self.guard is not None:
            self.guard.close()
            if self.whole_states is not None:
                self.whole_states.close()
            self.guard, self.guarded = None, {}
            Strategy.guards.discard(self)

    def unguarded(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are ordinary ones."""
        return nullcontext() if self.guard is None else self.guard.suspend()

    def norm_groups(self) -> list[Communicator]:
        """Return the groups of ranks over which sums over this rank's parts must be reduced, in this order."""
        return [] if self.replica is None else [self.replica]

    def counts(self, name: str) -> bool:
        """Return whether this rank counts a parameter, among all ranks that hold the same elements of it."""
        return True

    def before_write(self) -> None:
        """Prepare for a change of guarded parameters by the program itself. Collective."""

    def gradients_final(self) -> None:
        """Apply pending changes to the gradients before their next use."""

    # Unreduced gradients ----------------------------------------------------------------------------------------------

    def local_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the local gradients that backward passes under ``no_sync`` have accumulated, by name."""
        for name, parameter in trainable(self.model):
            if parameter.grad is not None:
                yield name, parameter.grad

    def average_gradients(self) -> None:
        """Average over the data ranks the gradients that the program has assigned itself. Collective."""
        if self.comm.size > 1:
            raise UsageError(
                f"average_gradients under {type(self).__name__}: allowed is parallel.data = 'ddp'; call "
                "loss.backward(), which leaves averaged gradients",
                everywhere=True,
            )

    def drop_gradients(self) -> None:
        """Discard all gradients, reduced or not."""
        for _, parameter in trainable(self.model):
            parameter.grad = None
        self._local_weight = None


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require gradients, each once, under the first of its names."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def clip_whole_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Clip gradients that this rank holds in full; return their norm before clipping.

    If the norm is not finite, the gradients stay unchanged: scaling would spread NaN to all of
    them, and hide its origin.
    """
    dense = [parameter for _, parameter in trainable(model) if parameter.grad is not None]
    sparse = []
    for parameter in list(dense):
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # a row may have been looked up more than once
            sparse.append(element_values(parameter.grad))
            dense = [one for one in dense if one is not parameter]
    norm = torch.nn.utils.get_total_norm([*(one.grad for one in dense if one.grad is not None), *sparse])
    if math.isfinite(max_norm) and bool(torch.isfinite(norm)):
        torch.nn.utils.clip_grads_with_norm_(dense, max_norm, norm)
        for values in sparse:
            values.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(values.device))  # same factor as torch's
    return norm


def element_values(gradient: Tensor) -> Tensor:
    """Return the values of a gradient, each once; for a sparse gradient those of its rows."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def broadcast_buffers(model: nn.Module, comm: Communicator) -> None:
    """Broadcast the buffers of rank 0 to all ranks, one message per dtype. Collective."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer)
    for buffers in kinds.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers]).cpu()
        comm.broadcast(flat)
        for buffer, values in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers])):
            buffer.copy_(values.view_as(buffer))
