"""Gradient reduction for sharded data parallelism, overlapped with the backward pass; each rank keeps its slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import Work
from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.buffer_pool import BufferPool
from hpctrain.parallel.fsdp.param_group import CommStream, ParamGroup, StreamWork


@dataclass(eq=False)
class GroupReduction:
    """Reduction of the gradients of one parameter group: their unsharded buffer, its state, and the reduced slice."""

    piece: ParamGroup
    number: int  # index among the parameter groups
    first: int  # index of the group's first parameter among the parameters of all groups
    dtype: torch.dtype  # dtype of the gradients in communication
    # indices within the group of the parameters whose gradient has been computed
    arrived: set[int] = field(default_factory=set)
    # those of ``arrived`` whose gradient is not yet copied to the flat buffer
    waiting: set[int] = field(default_factory=set)
    flat: Tensor | None = None
    ticket: StreamWork | None = None
    target: Tensor | None = None  # output of the reduce-scatter: the slice of this rank
    _views: list[Tensor] = field(default_factory=list)
    _slice: Tensor | None = None  # this rank's slice of the gradients; its memory is reused in each step

    @property
    def nbytes(self) -> int:
        """Return the size of the unsharded gradients in bytes."""
        return self.piece.layout.numel * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        """Return whether the gradients of all parameters of the group have been computed."""
        return len(self.arrived) == len(self.piece.members)

    def open(self, memory: Tensor) -> None:
        """Use ``memory``, given as bytes, as the buffer of the unsharded gradients."""
        layout, end = self.piece.layout, 0
        self.flat, self._views = memory.view(self.dtype), []
        for member, place, numel in zip(self.piece.members, layout.places, layout.numels):
            self.flat[end:place].zero_()  # padding is reduced too, and must stay finite
            end = place + numel
            self._views.append(self.flat[place:end].view(member.shape))
        self.flat[end:].zero_()

    def put(self, number: int, share: float) -> None:
        """Write ``share`` x a parameter's gradient to its place in the buffer in one pass, then release the gradient.

        Writes zeros if the parameter has no gradient. A share of 0 writes zeros even if the
        gradient is infinite or NaN.
        """
        whole, view = self.piece.members[number].whole, self._views[number]
        if whole.grad is None or share == 0:
            view.zero_()
        else:
            torch.mul(whole.grad, share, out=view)
        whole.grad = None

    def aim(self) -> Tensor:
        """Return the buffer for this rank's slice: the one of the last step, or a new one if they accumulate there."""
        piece = self.piece
        if self._slice is None:
            self._slice = torch.zeros_like(piece.own)
        adds = any(member.shard.grad is not None for member in piece.members)
        if adds or self.dtype is not piece.own.dtype:
            self.target = torch.empty(piece.layout.share, dtype=self.dtype, device=piece.own.device)
        else:
            self.target = self._slice
        return self.target

    def land(self) -> None:
        """Process this rank's slice, which ``target`` holds or will hold after enqueued work; does nothing here."""

    def close(self) -> None:
        """Release the buffer of the unsharded gradients."""
        self.flat, self._views = None, []

    def hand_out(self, used: list[bool]) -> None:
        """Assign the reduced gradients to the shards.

        ``used`` marks the parameters that have a gradient on any rank. The others keep the gradient
        that they had, as in a backward pass without sharding.
        """
        assert self._slice is not None and self.target is not None
        for member, wanted in zip(self.piece.members, used):
            begin, end = member.held.offset, member.held.offset + member.held.numel
            if not wanted:
                continue
            new, shard = self.target[begin:end].view(member.shard.shape), member.shard
            if shard.grad is not None:
                shard.grad.add_(new)
                continue
            kept = self._slice[begin:end].view(shard.shape)
            shard.grad = kept if self.target is self._slice else kept.copy_(new)
        self.target = None
        self.arrived.clear()


# Gradient reduction for sharded data parallelism, overlapped with the backward pass; each rank keeps its slice --------
#
# Note: the path of a gradient. Autograd computes a fresh gradient and calls its hook. The hook
# divides the gradient by the number of ranks while copying it to the flat gradients of its parameter
# group. This takes one pass, with the gradient still in cache. The hook then releases the gradient.
# When all gradients of a group are computed, the group is reduced into the slices of the owning
# ranks, and a later group reuses its memory. All ranks reduce the groups in the same order: the order
# in which they were complete on rank 0 in the first backward pass. The order of the gradients on a
# rank does not matter. If a gradient is computed before there is memory for its group, it stays in
# the tensor that autograd returned.
#
# The set of parameters that any rank has used is known only after the last rank has ended its
# backward pass. One message then distributes it.


class Watcher(Protocol):
    """Observer of the reduction of parameter groups."""

    def complete(self, piece: int) -> None:
        """Record that all gradients of a group have been computed."""

    def reducing(self, piece: int) -> None:
        """Prepare for the reduction of a group; called between two collectives."""


class GradReduction:
    """Reduction of the gradients of trained parameter groups; the shards receive the average over all ranks.

    The ranks of ``comm`` share one replica of the model. ``replicas``, if given, connects the ranks
    that hold the same slice of each replica. ``world`` holds all ranks. Gradients are communicated
    in ``dtype``, or in their own dtype if that is None. Without ``early`` all groups are reduced at
    the end of the backward pass, so that no other collective of the pass runs between their
    reductions. ``flow_of`` creates the object that follows the gradients of one group. A subclass
    of ``GroupReduction`` that stores slices elsewhere learns from its ``land`` method when they are reduced.
    """

    def __init__(
        self,
        pieces: Sequence[ParamGroup],
        comm: Communicator,
        world: Communicator,
        replicas: Communicator | None,
        room: BufferPool,
        lane: CommStream,
        *,
        dtype: torch.dtype | None = None,
        early: bool = True,
        watcher: Watcher | None = None,
        flow_of: Callable[[ParamGroup, int, int, torch.dtype], GroupReduction] = GroupReduction,
    ) -> None:
        self._comm, self._world, self._replicas = comm, world, replicas
        self.sample_weight = 1.0  # of this rank's gradients in the average over all ranks
        self._room, self._lane, self._early, self._watcher = room, lane, early, watcher
        self.flows: list[GroupReduction] = []
        count = 0
        for number, piece in enumerate(pieces):
            own = piece.members[0].whole.dtype
            self.flows.append(flow_of(piece, number, count, dtype if dtype and own is torch.float32 else own))
            count += len(piece.members)
        self._used = world.empty(count, torch.uint8)
        self._seen: list[int] = []  # indices of groups, in the order in which they were complete in the first pass
        self._settled = False
        self.names_given = False
        self.given: set[str] = set()  # names of the parameters that received a gradient in the last pass, if requested
        self._line_up(list(range(len(self.flows))))

    def _line_up(self, order: Sequence[int]) -> None:
        """Fix the order in which groups are reduced."""
        self._line = [self.flows[number] for number in order]
        self._position = {flow.number: position for position, flow in enumerate(self._line)}
        self._room.order([flow.nbytes for flow in self._line])
        self._next = 0

    @property
    def _share(self) -> float:
        """Return this rank's factor in the average.

        It is applied while a gradient is copied, so that no separate pass is needed for the
        division.
        """
        return self.sample_weight / self._world.size

    # Gradients during the backward pass -------------------------------------------------------------------------------

    def take(self, flow: GroupReduction, number: int) -> None:
        """Take the gradient that a parameter of a group has just received; reduce the groups that are complete."""
        self._check(flow, number)
        flow.arrived.add(number)
        if flow.flat is not None or self._open(flow):
            flow.put(number, self._share)
        else:
            flow.waiting.add(number)
        if flow.complete:
            if not self._settled:
                self._seen.append(flow.number)
            if self._watcher is not None:
                self._watcher.complete(flow.number)
            if self._early:
                self._reduce_complete()

    def finish(self) -> None:
        """Reduce the remaining groups, wait for all reductions, and assign the gradients to the shards. Collective."""
        used = self._used.numpy()
        for flow in self.flows:
            for number, member in enumerate(flow.piece.members):
                used[flow.first + number] = number in flow.arrived or member.whole.grad is not None
        for flow in self._line[self._next :]:
            self._start(flow)
        self._world.all_reduce(self._used, "max")
        everybody = used.astype(bool).tolist()
        self.given = {
            member.name
            for flow in self.flows
            for member, wanted in zip(flow.piece.members, everybody[flow.first :])
            if wanted
        } if self.names_given else set()
        for flow in self._line:
            self._await(flow)
            flow.hand_out(everybody[flow.first : flow.first + len(flow.piece.members)])
        self._next = 0
        if not self._settled:
            self._settle()

    def hurry(self, number: int) -> None:
        """Reduce the groups up to ``number``, with zeros for gradients that this rank does not compute."""
        for flow in self._line[self._next : self._position[number] + 1]:
            self._start(flow)

    # Internals --------------------------------------------------------------------------------------------------------

    def _check(self, flow: GroupReduction, number: int) -> None:
        member = flow.piece.members[number]
        if self._position[flow.number] < self._next and number not in flow.arrived:
            raise UsageError(
                f"the gradient of {member.name} came when it had been reduced, in the order of the first step: "
                "let units run in one order, or make one unit of what changes places"
            )
        if number in flow.arrived:
            raise UsageError(
                f"parameter {member.name} got its gradient twice in one backward pass: "
                "use non-reentrant activation checkpointing (use_reentrant=False)"
            )
        assert member.whole.grad is not None
        if member.whole.grad.layout is not torch.strided:
            raise UsageError(f"parameter {member.name} got a sparse gradient: only dense ones can be reduced")

    def _open(self, flow: GroupReduction) -> bool:
        """Allocate memory for a group; return False if a group that uses this memory is not yet being reduced."""
        position = self._position[flow.number]
        before = self._room.before(position)
        if before > self._next:
            return False
        for other in self._line[:before]:
            self._await(other)
        flow.open(self._room.open(position))
        return True

    def _reduce_complete(self) -> None:
        while self._next < len(self._line) and self._line[self._next].complete:
            self._start(self._line[self._next])
        if self._next:
            last = self._line[self._next - 1].ticket
            if last is not None:
                last.done()  # drives all reductions for which the other ranks are ready

    def _fill(self, flow: GroupReduction) -> None:
        """Complete a group: a gradient that this pass did not compute is an accumulated one, or zeros."""
        if flow.flat is None:
            opened = self._open(flow)
            assert opened, "every piece before has been started"
        for number in range(len(flow.piece.members)):
            if number not in flow.arrived or number in flow.waiting:
                flow.put(number, self._share)
        flow.waiting.clear()

    def _start(self, flow: GroupReduction) -> None:
        """Enqueue the reduction of a group whose gradients have all been computed."""
        if flow.flat is None or flow.waiting or not flow.complete:
            self._fill(flow)
        flat, target = flow.flat, flow.aim()
        assert flat is not None
        if self._watcher is not None:
            self._watcher.reducing(flow.number)

        def carry() -> Work | None:
            work = self._reduce(flow.piece, target, flat)
            if self._replicas is not None and self._lane.beside:
                self._replicas.all_reduce(target, "sum")
            if (work is None or work.done()) and (self._replicas is None or self._lane.beside):
                flow.land()
            return work

        flow.ticket = self._lane.run(carry)
        self._next += 1

    def _reduce(self, piece: ParamGroup, target: Tensor, flat: Tensor) -> Work | None:
        """Start to reduce a group's gradients into this rank's slice; on a single rank this is the whole group."""
        if not piece.alone:
            work = self._comm.reduce_scatter(target, flat, "sum", async_op=True)
            return None if isinstance(work, Tensor) else work
        if target is not flat:
            target.copy_(flat)
        return None

    def _await(self, flow: GroupReduction) -> None:
        """Order subsequent computations after the reduction of a group, and release its memory."""
        if flow.ticket is None:
            return
        flow.ticket.wait()
        if self._replicas is not None and not self._lane.beside:
            assert flow.target is not None
            self._replicas.all_reduce(flow.target, "sum")
        flow.land()
        flow.ticket = None
        flow.close()

    def _settle(self) -> None:
        """Switch to the order in which rank 0 saw groups complete in the first backward pass."""
        order = self._world.broadcast_object(self._seen)
        unseen = [number for number in range(len(self.flows)) if number not in set(order)]
        self._settled = True
        self._line_up(order + unseen)
