"""Reduce gradients while backward still runs, and leave each rank its slice of them.

Note: gradients pass through. Autograd hands over a fresh gradient; its hook writes it, while it is in cache and divided
by the number of ranks on the way, to its place in the flat gradients of its piece, and lets go of it. A piece whose
gradients have all come is reduced into the slices of its owners, and its memory serves a later one. Pieces are reduced
in one order on all ranks, whatever order their gradients come in: the one in which they were complete on rank 0 in the
first backward pass. A gradient that comes before there is room for its piece waits where autograd left it.

Which parameters anybody used is not known before the last rank has ended its backward pass: one message tells all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.carrier import Lane
from hpctrain.parallel.fsdp.flow import Flow
from hpctrain.parallel.fsdp.piece import Piece
from hpctrain.parallel.fsdp.rooms import Room
from hpctrain.transport.base import Work


class Watcher(Protocol):
    """Be told what becomes of pieces."""

    def complete(self, piece: int) -> None:
        """Take note that all gradients of a piece have come."""

    def reducing(self, piece: int) -> None:
        """Come between two collectives: a piece is about to be reduced."""


class Reduction:
    """Take gradients from the whole parameters of trained pieces, and give the shards their average over all ranks.

    The ranks of ``comm`` share a replica of the model; ``replicas``, if there are any, hold the same slice of others;
    ``world`` holds all ranks. Gradients travel in ``dtype``, or in their own. Where they are not reduced ``early``, all
    are at the end of the backward pass, so that no other collective of it comes between them. ``flow_of`` makes what
    follows the gradients of a piece: one that takes slices elsewhere knows by its ``land`` when they are reduced.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        comm: Communicator,
        world: Communicator,
        replicas: Communicator | None,
        room: Room,
        lane: Lane,
        *,
        dtype: torch.dtype | None = None,
        early: bool = True,
        watcher: Watcher | None = None,
        flow_of: Callable[[Piece, int, int, torch.dtype], Flow] = Flow,
    ) -> None:
        self._comm, self._world, self._replicas = comm, world, replicas
        self.sample_weight = 1.0  # of this rank's gradients in the average over all ranks
        self._room, self._lane, self._early, self._watcher = room, lane, early, watcher
        self.flows: list[Flow] = []
        count = 0
        for number, piece in enumerate(pieces):
            own = piece.members[0].whole.dtype
            self.flows.append(flow_of(piece, number, count, dtype if dtype and own is torch.float32 else own))
            count += len(piece.members)
        self._used = world.empty(count, torch.uint8)
        self._seen: list[int] = []  # numbers of pieces, as they were complete in the first pass
        self._settled = False
        self.names_given = False
        self.given: set[str] = set()  # names of the parameters that the last pass gave a gradient, if asked for
        self._line_up(list(range(len(self.flows))))

    def _line_up(self, order: Sequence[int]) -> None:
        """Fix the order in which pieces are reduced."""
        self._line = [self.flows[number] for number in order]
        self._position = {flow.number: position for position, flow in enumerate(self._line)}
        self._room.order([flow.nbytes for flow in self._line])
        self._next = 0

    @property
    def _share(self) -> float:
        """Return this rank's share of the average: put in with each gradient, so no pass is needed to divide."""
        return self.sample_weight / self._world.size

    # Gradients as they come -------------------------------------------------------------------------------------------

    def take(self, flow: Flow, number: int) -> None:
        """Take the gradient that a member of a piece has just got; reduce what is complete."""
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
        """Reduce what is left, wait for all of it, and give the shards their gradients; a call by all ranks."""
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
        """Reduce up to a piece, with zeros for what nobody computes here."""
        for flow in self._line[self._next : self._position[number] + 1]:
            self._start(flow)

    # How --------------------------------------------------------------------------------------------------------------

    def _check(self, flow: Flow, number: int) -> None:
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

    def _open(self, flow: Flow) -> bool:
        """Find memory for a piece; False while one that has to make room has not even been started."""
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
                last.done()  # carries on all reductions for which the others are ready

    def _fill(self, flow: Flow) -> None:
        """Complete a piece: what did not come in this pass is what was accumulated before, or nothing."""
        if flow.flat is None:
            opened = self._open(flow)
            assert opened, "every piece before has been started"
        for number in range(len(flow.piece.members)):
            if number not in flow.arrived or number in flow.waiting:
                flow.put(number, self._share)
        flow.waiting.clear()

    def _start(self, flow: Flow) -> None:
        """Hand over the gradients of a piece, all of which have come."""
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

    def _reduce(self, piece: Piece, target: Tensor, flat: Tensor) -> Work | None:
        """Begin to reduce gradients of a piece into this rank's slice, which may be all of them."""
        if not piece.alone:
            work = self._comm.reduce_scatter(target, flat, "sum", async_op=True)
            return None if isinstance(work, Tensor) else work
        if target is not flat:
            target.copy_(flat)
        return None

    def _await(self, flow: Flow) -> None:
        """Order what comes next behind the reduction of a piece, and take its memory back."""
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
        """From now on reduce in the order in which rank 0 saw pieces complete in the first backward pass."""
        order = self._world.broadcast_object(self._seen)
        unseen = [number for number in range(len(self.flows)) if number not in set(order)]
        self._settled = True
        self._line_up(order + unseen)
