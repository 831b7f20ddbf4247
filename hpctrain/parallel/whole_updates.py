"""Updates by optimizers that need whole parameters (Muon, Adafactor): one rank, the owner, updates each parameter.

Note: how a parameter is updated. Between the steps, ranks hold slices of parameters and averaged
gradients, as for other optimizers. Clipping, accumulation and skipped steps work on these. Just
before the update, after all other hooks, the ranks send their elements of a parameter and of its
gradient to the owner. During the update, the parameter object that the optimizer holds has the
whole tensor on the owner; the optimizer's groups lack it on all other ranks. Afterwards the owner
sends the new elements back. Therefore the optimizer's state of a parameter is whole and exists on
the owner only.

With Psi bytes of parameters on p ranks, each rank sends about 3 Psi / p bytes more per step than
with an elementwise optimizer. During the update it needs about 2 Psi / p bytes for the parameters
that it owns and their gradients.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.plain_tensors import on_shards

if TYPE_CHECKING:
    from hpctrain.parallel.fsdp.param_group import ParamGroup, ShardedParam

BUFFER = 2**25  # bytes of a rank's messages in flight: the exchange of larger tensors takes several rounds

Views = list[Tensor]  # flat tensors, whose elements are sent or received one after another


# Owners and exchange --------------------------------------------------------------------------------------------------


def assign_owners(numels: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the owner of each parameter, given its elements and those that each rank owns already.

    The largest parameter is assigned first, each to the rank with the fewest elements (Graham's LPT
    rule): no rank owns more than the mean plus one parameter.
    """
    owned, owners = list(loads), [0] * len(numels)
    for number in sorted(range(len(numels)), key=lambda number: -numels[number]):
        owners[number] = min(range(len(owned)), key=owned.__getitem__)
        owned[owners[number]] += numels[number]
    return owners


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """Exchange of parameters of one dtype between the ranks that hold their elements and their owners.

    ``held[rank]`` are the parameters that a rank owns and of which this rank holds elements.
    ``owned[rank]`` are the ranges of this rank's own parameters that a rank holds. ``most`` is the
    largest number of elements between two different ranks.
    """

    members: list[ShardedParam]
    held: list[list[ShardedParam]]
    owned: list[list[tuple[ShardedParam, slice]]]
    most: int

    def shards(self, tensors: Mapping[ShardedParam, Tensor]) -> list[Views]:
        """Return this rank's elements of the tensors, by owner."""
        return [[tensors[member].view(-1) for member in members] for members in self.held]

    def wholes(self, tensors: Mapping[ShardedParam, Tensor]) -> list[Views]:
        """Return the ranges of this rank's whole tensors, by the rank that holds them."""
        return [[tensors[member].view(-1)[part] for member, part in parts] for parts in self.owned]

    def run(self, comm: Communicator, outgoing: Sequence[Views], incoming: Sequence[Views]) -> None:
        """Copy the elements of ``outgoing[r]`` to those of ``incoming`` on rank r, which are as many. Collective."""
        for target, source in zip(incoming[comm.rank], outgoing[comm.rank], strict=True):
            target.copy_(source)
        if not self.most:
            return
        like, others = self.members[0].shard, [rank for rank in range(comm.size) if rank != comm.rank]
        count = min(self.most, max(BUFFER // (comm.size * like.element_size()), 1))
        sent = torch.zeros(comm.size, count, dtype=like.dtype, device=like.device)
        received = torch.empty_like(sent)
        for start in range(0, self.most, count):
            for rank in others:
                for part, place in _parts(outgoing[rank], start, count):
                    sent[rank, place].copy_(part)
            comm.all_to_all(received.view(-1), sent.view(-1))
            for rank in others:
                for part, place in _parts(incoming[rank], start, count):
                    part.copy_(received[rank, place])


def _parts(views: Views, start: int, count: int) -> Iterator[tuple[Tensor, slice]]:
    """Yield the parts of views among ``count`` of their elements from ``start`` on, and their places there."""
    end = 0
    for view in views:
        begin, end = end, end + view.numel()
        low, high = max(begin, start), min(end, start + count)
        if low < high:
            yield view[low - begin : high - begin], slice(low - start, high - start)


# Updates --------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Known:
    """Facts about an optimizer: owners of its parameters, those that all ranks hold, and plans of exchanges."""

    owners: dict[ShardedParam, int] = field(default_factory=dict)
    agreed: set[ShardedParam] = field(default_factory=set)
    plans: dict[tuple[ShardedParam, ...], list[ExchangePlan]] = field(default_factory=dict)


@dataclass(eq=False)
class _Update:
    """Update in progress: data and gradients of the shards, groups of the optimizer, nested calls of ``step``."""

    optimizer: torch.optim.Optimizer
    plans: list[ExchangePlan] = field(default_factory=list)
    data: dict[ShardedParam, Tensor] = field(default_factory=dict)
    grads: dict[ShardedParam, Tensor | None] = field(default_factory=dict)
    groups: list[list[nn.Parameter]] = field(default_factory=list)
    depth: int = 0


class WholeUpdates:
    """Updates of whole parameters by their owners, among the ranks ``comm`` that hold one replica.

    ``needed(optimizer)`` tells whether an optimizer makes such updates.
    """

    def __init__(
        self, groups: Sequence[ParamGroup], comm: Communicator, needed: Callable[[torch.optim.Optimizer], bool]
    ) -> None:
        self._comm, self._needed = comm, needed
        self._members = [(group, number, member) for group in groups for number, member in enumerate(group.members)]
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._update: _Update | None = None  # in progress
        self._next: _Update | None = None  # of the step that has begun
        self._handles: list[RemovableHandle] = []  # of the hooks of this step

    @property
    def updating(self) -> bool:
        """Return whether an update is in progress; one that has raised an error is undone first.

        The step of an optimizer may call that of its base class or of another optimizer: these
        calls are parts of the same update.
        """
        self.undo_failed()
        return self._update is not None

    def undo_failed(self) -> None:
        """Undo an update that has raised an error: parameters have their shards and former values again."""
        if self._update is not None and not _is_running(self._update.optimizer):
            self._restore()
            self.end()

    def holds_state(self, optimizer: torch.optim.Optimizer, member: ShardedParam) -> bool | None:
        """Return whether this rank has the optimizer's whole state of a parameter; None if ranks have slices of it."""
        return self._owners(optimizer)[member] == self._comm.rank if self._needed(optimizer) else None

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a step of an optimizer. Collective.

        Elements are exchanged after all hooks of the program before the update, and sent back before
        all hooks after it: those see shards.
        """
        self._agree(optimizer)
        self.end()  # a step that has raised an error before its update
        self._next = _Update(optimizer)
        after = optimizer.register_step_post_hook(self._after)
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        self._handles = [optimizer.register_step_pre_hook(self._before), after]

    def end(self) -> None:
        """End the step; called behind the optimizer's own hooks, which torch iterates over until then."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _owners(self, optimizer: torch.optim.Optimizer) -> dict[ShardedParam, int]:
        """Return the owners of an optimizer's parameters; parameters added later do not move earlier ones."""
        owners = self._known.setdefault(optimizer, _Known()).owners
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        new = [each for _, _, each in self._members if id(each.shard) in held and each not in owners]
        if new:
            loads = [0] * self._comm.size
            for member, rank in owners.items():
                loads[rank] += member.shape.numel()
            owners.update(zip(new, assign_owners([member.shape.numel() for member in new], loads)))
        return owners

    def _agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` for an optimizer that differs between the ranks, or has states of shards. Collective."""
        owners, known = self._owners(optimizer), self._known[optimizer]
        if known.agreed.issuperset(owners):
            return
        name, rank = type(optimizer).__name__, self._comm.rank
        early = [each.name for each, owner in owners.items() if owner != rank and optimizer.state.get(each.shard)]
        everyone = self._comm.all_gather_object(([member.name for member in owners], early[:1]))
        if any(names != everyone[0][0] for names, _ in everyone):
            raise UsageError(
                f"optimizer {name} holds other parameters on some ranks than on rank 0: they must be the same on all; "
                "choose parameters by their names or numbers of dims, not by sizes, which are those of shards",
                everywhere=True,
            )
        if any(found for _, found in everyone):
            raise UsageError(
                f"optimizer {name} has states of parameter {next(found[0] for _, found in everyone if found)} before "
                "its first step, which are those of shards: create states at the first step that updates a parameter",
                everywhere=True,
            )
        known.agreed.update(owners)

    def _plans(self, optimizer: torch.optim.Optimizer, used: tuple[ShardedParam, ...]) -> list[ExchangePlan]:
        known = self._known[optimizer]
        if used not in known.plans:
            dtypes = dict.fromkeys(member.shard.dtype for member in used)
            known.plans.clear()
            known.plans[used] = [
                self._plan({member for member in used if member.shard.dtype is dtype}, known.owners) for dtype in dtypes
            ]
        return known.plans[used]

    def _plan(self, used: set[ShardedParam], owners: Mapping[ShardedParam, int]) -> ExchangePlan:
        rank, size = self._comm.rank, self._comm.size
        held: list[list[ShardedParam]] = [[] for _ in range(size)]
        owned: list[list[tuple[ShardedParam, slice]]] = [[] for _ in range(size)]
        between: dict[tuple[int, int], int] = {}
        for group, number, member in self._members:
            for holder, begin, end in group.layout.holders(number) if member in used else ():
                owner = owners[member]
                if holder == rank:
                    held[owner].append(member)
                if owner == rank:
                    owned[holder].append((member, slice(begin, end)))
                if holder != owner:
                    between[holder, owner] = between.get((holder, owner), 0) + end - begin
        members = [member for _, _, member in self._members if member in used]
        return ExchangePlan(members, held, owned, max(between.values(), default=0))

    # Around the update ------------------------------------------------------------------------------------------------

    @_disable_dynamo
    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._update is not None:
            self._update.depth += 1
            return None
        given = _with_loss(args, kwargs)
        self._update, self._next = self._next, None
        assert self._update is not None
        self._gather(self._update)
        return given

    @on_shards
    @torch.no_grad()
    def _gather(self, update: _Update) -> None:
        """Make the parameters that this rank owns whole, and hide those of other ranks from the optimizer."""
        optimizer, rank = update.optimizer, self._comm.rank
        owners = self._known[optimizer].owners
        held = [member for _, _, member in self._members if member in owners]
        has_gradient = torch.tensor([member.shard.grad is not None for member in held], dtype=torch.uint8)
        self._comm.all_reduce(has_gradient, "max")
        used = tuple(member for member, has in zip(held, has_gradient.tolist()) if has)
        update.plans = self._plans(optimizer, used)
        update.data = {member: member.shard.data for member in used}
        update.grads = {member: member.shard.grad for member in used}
        whole = [self._gathered(plan, update.data, owners) for plan in update.plans]
        missing = {member: torch.zeros_like(update.data[member]) for member in used if member.shard.grad is None}
        gradients = {member: grad for member, grad in update.grads.items() if grad is not None} | missing
        whole_gradients = [self._gathered(plan, gradients, owners) for plan in update.plans]
        for tensors, their_gradients in zip(whole, whole_gradients):
            for member, tensor in tensors.items():
                member.shard.grad = None
                member.shard.data = tensor
                member.shard.grad = their_gradients[member]
        update.groups = [group["params"] for group in optimizer.param_groups]
        hidden = {id(member.shard) for member in held if member not in used or owners[member] != rank}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in hidden]

    def _gathered(
        self, plan: ExchangePlan, tensors: Mapping[ShardedParam, Tensor], owners: Mapping[ShardedParam, int]
    ) -> dict[ShardedParam, Tensor]:
        """Return the whole tensors of the parameters that this rank owns, of all ranks' elements. Collective."""
        own = [member for member in plan.members if owners[member] == self._comm.rank]
        like = plan.members[0].shard
        whole = {member: torch.empty(member.shape, dtype=like.dtype, device=like.device) for member in own}
        plan.run(self._comm, plan.shards(tensors), plan.wholes(whole))
        return whole

    @_disable_dynamo
    @on_shards
    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Send the new elements to the ranks that hold them, and give the parameters their shards back."""
        update = self._update
        assert update is not None
        if update.depth:
            update.depth -= 1
            return
        owners, rank = self._known[optimizer].owners, self._comm.rank
        whole = {member: member.shard.data.contiguous() for member in update.data if owners[member] == rank}
        for plan in update.plans:
            plan.run(self._comm, plan.wholes(whole), plan.shards(update.data))
        self._restore()

    @on_shards
    def _restore(self) -> None:
        """End the update: undo what the optimizer saw."""
        update, self._update = self._update, None
        assert update is not None
        for group, parameters in zip(update.optimizer.param_groups, update.groups):
            group["params"] = parameters
        for member, data in update.data.items():
            member.shard.grad = None
            member.shard.data = data
            member.shard.grad = update.grads[member]


def _with_loss(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Call a closure, which computes gradients, before they are exchanged; return arguments with one of its loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return (args[0],), {**kwargs, "closure": lambda: loss}


def _is_running(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a call of an optimizer's ``step`` is in progress on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
