"""Bring gradients down to the host as they are reduced, and show them there as the shards' gradients.

Note: two parts under way. A reduced slice is copied on the device into one of two small rooms, in the shards' dtype,
and from there to the host; who wants a room that is still being emptied waits for it on the device. So a slice's own
memory is free at once, and no more than two parts lie on the device, however far the host's link is behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.parallel.fsdp.flow import Flow
from hpctrain.parallel.fsdp.piece import Piece, held_in
from hpctrain.parallel.offload.transfer import Arrival, Transfer

ROOMS = 2
Memory = Callable[[int, torch.dtype], Tensor]


@dataclass(eq=False)
class _Room:
    """Be memory of the device, and the copy that empties it."""

    memory: Tensor
    leaving: Arrival | None = None


class Landing:
    """Copy slices of gradients to memory that ``host`` gives, in parts of ``nbytes``; ``twice``: each into two in turn.

    ``landed`` is called with each slice that is on its way, ``before_adding`` before one is added to another.
    """

    def __init__(self, transfer: Transfer, host: Memory, device: torch.device, nbytes: int, *, twice: bool) -> None:
        self.host, self.twice = host, twice
        self._transfer, self._device, self._nbytes = transfer, device, nbytes
        self._rooms: list[_Room] = []
        self._spare: list[Tensor] = []
        self._users: list[LandingFlow | None] = [None] * ROOMS
        self._largest = 0  # bytes of a slice
        self._next_room = self._next_spare = 0
        self.landed: Callable[[LandingFlow], None] = lambda flow: None
        self.before_adding: Callable[[], None] = lambda: None

    def flow(self, piece: Piece, number: int, first: int, dtype: torch.dtype) -> LandingFlow:
        """Return what follows the gradients of a piece."""
        flow = LandingFlow(piece, number, first, dtype)
        flow.landing = self
        self._largest = max(self._largest, piece.layout.share * piece.own.itemsize)
        return flow

    def bring(self, target: Tensor, source: Tensor) -> Arrival:
        """Copy down, in the dtype of ``target``; the current stream is done with ``source`` when it has gone on."""
        step, arrival = max(self._nbytes // target.itemsize, 1), None
        for begin in range(0, target.numel(), step):
            part = target[begin : begin + step]
            room = self._room()
            memory = room.memory.view(target.dtype)[: part.numel()]
            memory.copy_(source[begin : begin + step])
            arrival = room.leaving = self._transfer.down(part, memory)
        assert arrival is not None, "no piece is empty"
        return arrival

    def _room(self) -> _Room:
        """Return the room whose turn it is, once it is empty."""
        if not self._rooms:
            size = -(-min(self._nbytes, self._largest) // 8) * 8
            self._rooms = [_Room(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(ROOMS)]
        room = self._rooms[self._next_room]
        self._next_room = (self._next_room + 1) % ROOMS
        if room.leaving is not None:
            room.leaving.join()
        return room

    def spare(self, flow: LandingFlow) -> Tensor:
        """Return host memory for a slice that is to be added to another; who had it has to be done first."""
        number, self._next_spare = self._next_spare, (self._next_spare + 1) % ROOMS
        if (user := self._users[number]) is not None and user.adds:
            user.absorb()
        self._users[number] = flow
        nbytes = flow.piece.own.nbytes
        self._spare += [torch.empty(0, dtype=torch.uint8)] * (ROOMS - len(self._spare))
        if self._spare[number].numel() < nbytes:
            self._spare[number] = self.host(nbytes, torch.uint8)
        return self._spare[number][:nbytes].view(flow.piece.own.dtype)


class LandingFlow(Flow):
    """Follow the gradients of one piece to the host; of one that stays on the device, do as any other does."""

    landing: Landing
    arrival: Arrival | None = None
    _other: Tensor | None = None
    _adding: Tensor | None = None  # a slice that is to be added to what the shards have
    _leaving: Tensor | None = None  # the device's memory of a slice, until the caller's stream has been joined

    @property
    def adds(self) -> bool:
        """Tell whether a slice is to be added to gradients that were there before."""
        return self._adding is not None

    @property
    def _lands(self) -> bool:
        return self.piece.courier is not None

    def aim(self) -> Tensor:
        """Return memory of the device for this rank's slice: on one rank the whole gradients themselves."""
        if not self._lands:
            return super().aim()
        self.arrival = None
        if self.piece.comm.size == 1:
            assert self.flat is not None
            self.target = self.flat
        else:
            self.target = torch.empty(self.piece.layout.share, dtype=self.dtype, device=self.piece.device)
        return self.target

    def land(self) -> None:
        """Begin to copy the slice to the host, and let go of it."""
        if not self._lands or self.target is None:
            return
        source, self.target = self.target, None
        self._leaving = source
        if any(member.shard.grad is not None and member.shard.numel() for member in self.piece.members):
            self.landing.before_adding()
            self._adding = self.landing.spare(self)
            self.arrival = self.landing.bring(self._adding, source)
        else:
            self.arrival = self.landing.bring(self.slice, source)
            self.landing.landed(self)

    def close(self) -> None:
        """Let go of the device's memory, as what comes next is ordered behind its use."""
        super().close()
        self._leaving = None

    @property
    def slice(self) -> Tensor:
        """Return the host's memory of this piece's gradients."""
        if self._slice is None:
            self._slice = self.landing.host(self.piece.layout.share, self.piece.own.dtype)
        return self._slice

    def turn(self) -> None:
        """Let the next gradients come to other memory, where each has two: these are still being read."""
        if self.landing.twice:
            self._slice, self._other = self._other, self._slice

    def absorb(self) -> None:
        """Wait for the slice, and add it where gradients add up."""
        assert self.arrival is not None
        self.arrival.wait()
        if self._adding is None:
            return
        new, self._adding = self._adding, None
        for member in self.piece.members:
            part = held_in(new, member.held, member.shape)
            if member.shard.grad is not None:
                member.shard.grad.add_(part)
            else:
                held_in(self.slice, member.held, member.shape).copy_(part)

    def hand_out(self, used: list[bool]) -> None:
        """Give the shards their gradients, which have come; one that nobody ``used`` keeps what it had."""
        if not self._lands:
            super().hand_out(used)
            return
        self.absorb()
        for member, wanted in zip(self.piece.members, used):
            if wanted and member.shard.grad is None:
                member.shard.grad = held_in(self.slice, member.held, member.shape)
        self.arrived.clear()

    def stay_on_device(self) -> None:
        """Give the host's memory back: from now on gradients stay on the device."""
        self._slice = self._other = None
