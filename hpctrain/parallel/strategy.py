"""Interfaces between the training loop and the parallel strategies.

``Strategy`` is what the loop needs of any strategy. ``SyncStrategy`` averages gradients over the
ranks. ``SplitStrategy`` also splits parameters, which guard and checkpoints ask about.
``AsyncStrategy`` lets every worker make its own updates. Callers ask for such a capability by
``isinstance``. The default implementations are correct for ranks that hold the whole model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain import trace
from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.clip import clip_whole_gradients, element_values
from hpctrain.parallel.model_agreement import trainable
from hpctrain.parallel.objective import CallArguments, Objective
from hpctrain.parallel.pipeline.skip import carrying
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm
from hpctrain.shard import Shard, Split

if TYPE_CHECKING:
    from hpctrain.parallel.guard.guard import ParameterGuard
    from hpctrain.parallel.offload.host_optimizer import HostOptimizer

Metrics = Mapping[str, float | list[int]]  # numbers by name; a list is a histogram


# Gradients ------------------------------------------------------------------------------------------------------------


class ModelGradients:
    """Gradients that this rank holds: averaged ones, and local ones of backward passes under ``no_sync``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Sample weight of the local gradients that a backward pass has left; None: there are none.
        self.local_weight: float | None = None

    def averaged(self) -> list[tuple[str, Tensor]]:
        """Return this rank's part of the averaged gradients, by name."""
        return [(name, each.grad) for name, each in trainable(self._model) if each.grad is not None]

    def local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the local gradients, by name."""
        yield from self.averaged()

    def scale(self, factor: Tensor) -> None:
        """Multiply this rank's part of the averaged gradients by a factor, a scalar."""
        gradients = [gradient for _, gradient in self.averaged()]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def drop(self) -> None:
        """Discard all gradients, averaged or not."""
        for _, parameter in trainable(self._model):
            parameter.grad = None
        self.local_weight = None

    def check_weight(self, weight: float) -> None:
        """Raise ``UsageError`` if local gradients were computed with another sample weight.

        Called before each pass that adds to them or reduces them, because one factor is applied to
        their sum.
        """
        if self.local_weight is None or self.local_weight == weight:
            return
        if any(bool(element_values(gradient).any()) for _, gradient in self.local()):
            raise UsageError(
                f"cannot add gradients of sample weight {weight:g} to those that no_sync has accumulated "
                f"at {self.local_weight:g}; the batches of one update must be divided over the ranks alike; "
                "write run.backward(batch, compute, accumulate=n)"
            )
        self.local_weight = None  # they were dropped


# Strategies -----------------------------------------------------------------------------------------------------------


class Strategy(ABC):
    """Base class of strategies, which are attached to a module by hooks and distribute its training over the ranks."""

    asynchronous = False  # whether ranks step asynchronously between evaluations and checkpoints
    reduces_early = False  # whether to reduce each backward pass of a step: whole gradients do not fit in memory
    adopts_frozen = False  # whether an initially frozen parameter may be trained later
    updates_itself = False  # whether the optimizer update in progress was started by the strategy
    place, stage = "", 0  # coordinates of this rank in the mesh, as text, and its pipeline stage
    pipe: Communicator | None = None  # stages of the pipeline that forward_backward executes; None without one
    copies: Communicator | None = None  # ranks that must hold the same parameters as this one after an update
    continues = False  # whether it can continue with fewer ranks (``rejoin``)
    replica: tuple[int, int] | None = None  # this rank's replica of a model that several ranks hold, and their number
    held: Mapping[int, nn.Parameter] | None = None  # parameters trained at attachment, by id; None: unknown
    early_updates: HostOptimizer | None = None  # that updates within a backward pass, before the optimizer's step
    _syncing = True  # whether backward passes are reduced
    _sample_weight = 1.0  # local samples x data ranks / global samples

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model, self.comm = model, comm
        self.gradients = ModelGradients(model)

    @property
    def data(self) -> Communicator:
        """Return the ranks that divide the samples of a batch; each of them gets different ones."""
        return self.comm

    @property
    def split(self) -> Split | None:
        """Return how the model's tensors are split over the ranks, for checkpoints; None if they are not split."""
        return None

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

    @abstractmethod
    def join_empty(self, *, backward: bool = True) -> None:
        """Join a forward (and ``backward``) pass of the other ranks without a sample on this rank. Collective."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let whole gradients accumulate locally for backward passes inside the ``with`` block."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

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

    # Gradients and updates --------------------------------------------------------------------------------------------

    def reduced_gradients(self) -> list[tuple[str, Tensor]]:
        return self.gradients.averaged()

    def average_gradients(self) -> None:
        """Average over the data ranks the gradients that the program has assigned itself. Collective."""
        if self.comm.size > 1:
            raise UsageError(
                f"average_gradients under {type(self).__name__}: allowed is parallel.data = 'ddp'; call "
                "loss.backward(), which leaves averaged gradients",
                everywhere=True,
            )

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their global norm is at most ``max_norm``; return the norm before, a scalar.

        Every rank holds all averaged gradients here, so the local norm is the global norm.
        """
        return clip_whole_gradients(self.model, max_norm)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` if an optimizer cannot update this rank's parameters."""

    def update_early(self, optimizer: torch.optim.Optimizer) -> None:
        """Allow updates within the backward pass; ``announce_update`` must precede the last pass before each update.

        The caller guarantees that updates do not depend on an inspection of the gradients. The
        hyperparameters are those at the time of that pass.
        """
        if self.early_updates is not None:
            self.early_updates.update_early(optimizer)

    def announce_update(self) -> None:
        """Announce that the next backward pass is the last before an update."""
        if self.early_updates is not None and self._syncing:
            self.early_updates.announce()

    # Parameters -------------------------------------------------------------------------------------------------------

    @contextmanager
    def unshard(self, *, write: bool = False) -> Iterator[None]:
        """Unshard the parameters of the model for the ``with`` block. Collective.

        Changes are discarded unless ``write`` is true; in that case the values of rank 0 are kept.
        """
        yield

    def refresh(self) -> None:
        """Synchronise after a change of parameters other than by the optimizer. Collective."""

    def drain(self) -> None:
        """Complete background work, so that parameters and states may be read. Collective."""

    def rejoin(self) -> None:
        """Continue with the ranks that the communicator now has, after others have died. Collective over them."""
        raise UsageError(f"{type(self).__name__} cannot continue with fewer ranks", everywhere=True)

    @abstractmethod
    def detach(self) -> None:
        """Remove all hooks from the module."""


class SyncStrategy(Strategy):
    """Strategy that averages the gradients of each backward pass over the ranks."""

    def deferred_reduction(self, *, reduces: bool = True) -> AbstractContextManager[None]:
        """Keep parameters unsharded and gradients local for any forward and backward passes of parts of the model.

        At the end of the ``with`` block all gradients are averaged at once, if it ``reduces`` them.
        Collective over the ranks of ``data``.
        """
        raise UsageError(f"{type(self).__name__} cannot train a model in parts", everywhere=True)


class SplitStrategy(SyncStrategy):
    """Synchronous strategy whose ranks may hold parts of parameters."""

    reproducible = False  # whether sums over parts must not depend on how parameters are divided
    guard: ParameterGuard | None = None  # of the partial parameters, once they are guarded

    @abstractmethod
    def partial_parameters(self) -> tuple[str, Mapping[str, nn.Parameter], bool]:
        """Return a description of this rank's partial parameters, these by name, and whether passes use them."""

    @abstractmethod
    def whole_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor if this rank holds a part of it; None if it holds all of it."""

    @abstractmethod
    def norm_groups(self) -> list[Communicator]:
        """Return the groups of ranks over which sums over this rank's parts must be reduced, in this order."""

    def counts(self, name: str) -> bool:
        """Return whether this rank counts a parameter, among all ranks that hold the same elements of it."""
        return True

    @abstractmethod
    def before_write(self) -> None:
        """Prepare for a change of guarded parameters by the program itself. Collective."""

    @abstractmethod
    def gradients_final(self) -> None:
        """Apply pending changes to the gradients before their next use."""

    def guarded(self, name: str) -> nn.Parameter | None:
        return None if self.guard is None else self.guard.parameters.get(name)

    def unguarded(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are ordinary ones."""
        return nullcontext() if self.guard is None else self.guard.suspend()

    def skip_checks(self) -> None:
        """Disable the checks of the first step."""

    def agree_on_generators(self) -> None:
        """Make the ranks that must draw the same numbers agree, after torch's generators were set. Collective."""


class AsyncStrategy(Strategy):
    """Strategy of workers that make their own updates; evaluations and checkpoints use their consensus state."""

    computes = True  # whether this rank computes
    sync_count = 0  # number of synchronisations that this rank has joined
    has_local_state = False  # whether workers hold different states, which a checkpoint stores per rank

    @property
    def split(self) -> Split | None:
        """Return the split in which rank 0 writes what all ranks hold alike in a consensus view."""
        return WholeTensors(spare=self.comm.rank > 0)

    def join_empty(self, *, backward: bool = True) -> None:
        """Do nothing: every worker makes its own passes."""

    @abstractmethod
    def consensus_view(self) -> AbstractContextManager[None]:
        """Load the consensus state of all ranks into the model for the ``with`` block. Collective."""

    @abstractmethod
    def conclude(self) -> None:
        """Leave the consensus state in the model on every rank, at the end of a run. Collective."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """Return metrics over all ranks since the last call, for plots. Collective."""

    def rank_local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the rank-local tensors beyond ``split``, for saving and for loading in place."""
        return {}


class WholeTensors:
    """``Split`` of a rank that holds tensors in full; if ``spare``, other ranks hold and write the same ones."""

    def __init__(self, *, spare: bool = False) -> None:
        self._spare = spare

    def shards(self, name: str, tensor: Any) -> list[Shard]:
        return [replace(Shard.whole(name, tensor), spare=self._spare)]


def consensus_view(strategy: Strategy) -> AbstractContextManager[None]:
    """Return a ``with`` block in which the model holds the state that evaluations and checkpoints use. Collective."""
    return strategy.consensus_view() if isinstance(strategy, AsyncStrategy) else nullcontext()


def metrics_of(strategy: Strategy) -> Metrics:
    """Return the metrics of all workers since the last call; none under synchronous strategies. Collective."""
    return strategy.metrics() if isinstance(strategy, AsyncStrategy) else {}


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
