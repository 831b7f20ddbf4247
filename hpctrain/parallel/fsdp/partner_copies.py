"""Copies of each rank's state on another node, from which a run goes back when a node has died.

Note: the copy of a partner. Every few steps, each rank copies its shards and optimizer states to memory
of its node, and keeps a copy of the rest of its state. It sends the shards to its partner on the next node
during the next steps. The partner compares their checksum before they count. There are two such copies,
used in turn: while one is sent, the one before remains valid on all ranks. If a node dies, its shards are
lost with it, but for these copies. The other ranks then all go back to the newest of them that is complete
for all ranks, and repeat the steps since.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import Work
from hpctrain.log import logger
from hpctrain.parallel.fsdp.shard_copies import Copies, Member, ShardCopies, State

SHARDS, FIXED, CHECKSUMS = range(3)  # tags


def partners(nodes: Sequence[int]) -> list[int]:
    """Return the partner of each rank: a rank of the next node. ``nodes`` is the node of each rank."""
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    order = sorted(members)
    following = {node: members[order[(place + 1) % len(order)]] for place, node in enumerate(order)}
    return [following[node][members[node].index(rank) % len(following[node])] for rank, node in enumerate(nodes)]


def checksum(memory: Tensor) -> int:
    return zlib.crc32(memory.numpy().data)


class Rest(Protocol):
    """Copy of the state of a rank without its shards."""

    def take(self) -> None:
        """Copy the present state."""

    def restore(self, *, together: bool) -> None:
        """Restore the copied state."""


@dataclass(eq=False)
class Held:
    """One copy of the rest of a rank's state; ``states`` are those of its optimizers that are not divided."""

    rest: Rest
    number: int = -1
    epoch: int = -1
    states: dict[Member, State] = field(default_factory=dict)


class PartnerMemory:
    """Copies of each rank's shards in memory of its node (``own``), and of other ranks' shards (``others``).

    Construction is collective. ``held`` is the rest of this rank's state, for both copies.
    """

    def __init__(self, comm: Communicator, like: Copies, serial: int, held: Sequence[Held]) -> None:
        fixed = {each.group for each in like.fixed}
        self.own = Copies(comm, like.layouts, like.values, fixed, serial)
        nodes: list[int] = comm.all_gather_object(comm.node)
        self.partners = partners(nodes)
        self.origins: dict[int, list[int]] = {rank: [] for rank in range(comm.size)}  # whose shards each rank gets
        for origin, partner in enumerate(self.partners):
            self.origins[partner].append(origin)
        self._most = max(map(len, self.origins.values()))
        # Of ranks that get the shards of several others, as their own nodes have fewer ranks.
        self.others = [Copies(comm, like.layouts, like.values, fixed, serial) for _ in range(self._most)]
        self.held = held

    def complete(self, number: int) -> dict[int, Tensor]:
        """Return the memory on this node that has a complete copy of this number, by the rank whose shards it has."""
        found: dict[int, Tensor] = {}
        for place, copies in enumerate(self.others):
            for rank in copies.complete(number):
                if place < len(self.origins[rank]):
                    found[self.origins[rank][place]] = copies.ranks[rank]
        return found | {rank: self.own.ranks[rank] for rank in self.own.complete(number)}


class PartnerTransfer:
    """Copy of one number on its way to the partner of each rank."""

    def __init__(self, comm: Communicator, memory: PartnerMemory, number: int, *, first: bool) -> None:
        self._memory, self._number, self._first = memory, number, first
        own, partner = memory.own, memory.partners[comm.rank]
        sums = [checksum(own.whole(own.own, number)), checksum(own.fixed_part(own.own)) if first else 0]
        self._sent = torch.tensor(sums)
        self._received = [torch.zeros(2, dtype=torch.int64) for _ in memory.origins[comm.rank]]
        self._works: list[Work] = []
        for place, origin in enumerate(memory.origins[comm.rank]):
            target = memory.others[place]
            target.mark(number, complete=False)
            self._works.append(comm.irecv(target.whole(target.own, number), origin, SHARDS))
            self._works.append(comm.irecv(self._received[place], origin, CHECKSUMS))
            if first and target.fixed_part(target.own).numel():
                self._works.append(comm.irecv(target.fixed_part(target.own), origin, FIXED))
        self._works.append(comm.isend(own.whole(own.own, number), partner, SHARDS))
        self._works.append(comm.isend(self._sent, partner, CHECKSUMS))
        if first and own.fixed_part(own.own).numel():
            self._works.append(comm.isend(own.fixed_part(own.own), partner, FIXED))

    def done(self) -> bool:
        """Return whether all messages have arrived; drives their progress."""
        self._works = [each for each in self._works if not each.done()]
        return not self._works

    def wait(self) -> None:
        for each in self._works:
            each.wait()
        self._works = []

    @property
    def ended(self) -> bool:
        """Whether no message can arrive any more: all have arrived, or failed because a rank has died."""
        try:
            return self.done()
        except Exception:  # of MPI: the communicator has been revoked
            return True

    def verify(self) -> bool:
        """Mark the copies that have arrived undamaged as complete; return whether all have."""
        undamaged = True
        for place, (shards, fixed) in enumerate(each.tolist() for each in self._received):
            target = self._memory.others[place]
            good = checksum(target.whole(target.own, self._number)) == shards
            good &= not self._first or checksum(target.fixed_part(target.own)) == fixed
            if good:
                target.mark(self._number, complete=True)
            undamaged &= good
        return undamaged


class PartnerCopies:
    """Copies of the state of a run on other nodes, every ``every`` steps.

    ``make_rest`` returns a copy of what is no shard, and ``position`` the number of the pass over the
    loader and the number of steps. Construction is collective over ``comm``.
    """

    def __init__(
        self,
        comm: Communicator,
        shards: ShardCopies,
        make_rest: Callable[[], Rest],
        position: Callable[[], tuple[int, int]],
        every: int,
    ) -> None:
        self._comm, self._shards, self._make_rest, self._position = comm, shards, make_rest, position
        self._every = every
        self._messages = comm.split(0)
        self._memories: list[PartnerMemory] = []  # the newest is the last; an earlier one until that has a valid copy
        self._like: Copies | None = None  # the copies that the newest memory was made for
        self._number = 0  # of the newest copy
        self._taken: tuple[int, int] | None = None  # the position at which it was taken
        self._transfer: PartnerTransfer | None = None
        self._sent = False  # whether a copy has been sent since the last death
        self._arrived = False  # whether this rank has verified what the newest copy has brought
        self._abandoned: list[PartnerTransfer] = []  # whose memory must stay until no message can arrive

    @property
    def due(self) -> bool:
        """Whether the next copy is due; the same on all ranks."""
        if self._comm.nodes == 1:
            return False
        (epoch, step), taken = self._position(), self._taken
        return taken is None or epoch != taken[0] or step >= taken[1] + self._every

    def advance(self) -> None:
        """Drive the messages of the copy in progress, and verify what has arrived. Not collective."""
        if self._transfer is not None and self._transfer.done():
            self._arrived, self._transfer = self._transfer.verify(), None

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present state, and begin to send it. Collective, at the beginning of a step."""
        self._abandoned = [each for each in self._abandoned if not each.ended]
        if self._sent:
            self._complete()
        newest = self._shards.newest
        first = self._like is not newest
        if first:
            serial = 1 + max((each.own.serial for each in self._memories), default=-1)
            serial, self._number = max(self._comm.all_gather_object((serial, self._number)))
            held = [Held(self._make_rest()), Held(self._make_rest())]
            self._memories.append(PartnerMemory(self._comm, newest, serial, held))
            self._like = newest
        self._copy(self._memories[-1], first=first)
        self._sent, self._arrived = True, False
        self._transfer = PartnerTransfer(self._messages, self._memories[-1], self._number, first=first)

    def _complete(self) -> None:
        """End the copy in progress; if it has arrived damaged on any rank, the next one replaces it. Collective."""
        if self._transfer is not None:
            self._transfer.wait()
            self.advance()
        arrived = torch.tensor([self._arrived], dtype=torch.uint8)
        self._comm.all_reduce(arrived, "min")
        if arrived[0]:
            del self._memories[:-1]
            self._number += 1
        elif self._comm.rank == 0:
            logger.warning("a copy of shards has arrived damaged on another node: the next one replaces it")

    def _copy(self, memory: PartnerMemory, *, first: bool) -> None:
        newest, own, held = self._shards.newest, memory.own, memory.held[self._number % 2]
        own.mark(self._number, complete=False)
        own.whole(own.own, self._number).copy_(newest.whole(newest.own, self._shards.copied))
        if first:
            own.fixed_part(own.own).copy_(newest.fixed_part(newest.own))
        own.mark(self._number, complete=True)
        held.rest.take()
        self._taken = self._position()
        held.number, held.epoch, held.states = self._number, self._taken[0], self._shards.states

    # Going back -------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Abandon the copy in progress, because a rank has died; the next one is due at once."""
        if self._transfer is not None:
            self._abandoned.append(self._transfer)
        self._transfer, self._sent, self._like, self._taken = None, False, None, None

    def go_back(self) -> bool:
        """Restore the newest copy that is complete for all earlier ranks; return whether there is one. Collective.

        All ranks are in a step. The copy must be of the same pass over the loader.
        """
        own = {
            (memory.own.serial, held.number): sorted(memory.complete(held.number))
            for memory in self._memories
            for held in memory.held
            if held.number >= 0 and held.epoch == self._position()[0]
        }
        everyone: list[Mapping[tuple[int, int], list[int]]] = self._comm.all_gather_object(own)
        for memory in reversed(self._memories):
            for held in sorted(memory.held, key=lambda each: -each.number):
                key = (memory.own.serial, held.number)
                complete = [have.get(key) for have in everyone]
                known = [each for each in complete if each is not None]
                everything = {rank for ranks in known for rank in ranks} == set(range(memory.own.size))
                if everything and len(known) == len(complete):
                    held.rest.restore(together=False)
                    self._shards.fill(memory.own, held.number, memory.complete(held.number), known, held.states)
                    return True
        return False
