"""Gradient offload: reduced gradients are copied to the host and become the gradients of the shards there.

Note: deferred scaling. Clipping would read and write every gradient once more. The update reads the
gradients anyway. Therefore only the factor is recorded, with the tensors to which it applies. A
tensor that is read before the update is scaled at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpctrain.parallel.fsdp.param_group import ParamGroup, held_in
from hpctrain.parallel.fsdp.reduce import GroupReduction
from hpctrain.parallel.offload.weights import Arrival, Transfer


class Gradients:
    """Gradients of the shards ``offloaded``: stored as their ``grad``, or set aside during an optimizer's step."""

    def __init__(self) -> None:
        self.offloaded: set[nn.Parameter] = set()
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._taken: dict[nn.Parameter, Tensor] = {}
        self._noted: dict[nn.Parameter, Tensor] = {}
        self._factor = 1.0

    def of(self, shard: nn.Parameter) -> Tensor | None:
        """Return the gradient of a shard, unscaled."""
        return self._aside.get(shard, shard.grad)

    def scale(self, shards: list[nn.Parameter], factor: Tensor) -> None:
        """Multiply the gradients of shards; those of offloaded shards are multiplied when they are used."""
        self.apply_scale()
        others = [shard.grad for shard in shards if shard not in self.offloaded and shard.grad is not None]
        if others:
            torch._foreach_mul_(others, factor.to(others[0].device))
        self._factor = float(factor)
        if self._factor != 1.0:
            found = {shard: self.of(shard) for shard in shards if shard in self.offloaded}
            self._noted = {shard: gradient for shard, gradient in found.items() if gradient is not None}

    def apply_scale(self, shards: Iterable[nn.Parameter] | None = None) -> None:
        """Apply pending factors now, to all gradients or to those of some shards."""
        for shard in list(self._noted) if shards is None else shards:
            gradient = self._noted.pop(shard, None)
            if gradient is not None and gradient is self._present(shard):
                gradient.mul_(self._factor)

    def factor(self, shard: nn.Parameter) -> float:
        """Return the factor by which the gradient of a shard is still to be multiplied."""
        noted = self._noted.get(shard)
        return self._factor if noted is not None and noted is self._present(shard) else 1.0

    def _present(self, shard: nn.Parameter) -> Tensor | None:
        return self._taken.get(shard, self.of(shard))

    def leave(self, shard: nn.Parameter, device: torch.device) -> None:
        """Remove a shard that has moved to the device, and move its gradient there."""
        self.apply_scale([shard])
        self.offloaded.discard(shard)
        if shard.grad is not None:
            shard.grad = shard.grad.to(device)

    def drop(self) -> None:
        """Drop the gradients that are set aside."""
        self._aside, self._noted = {}, {}

    # Around an update -------------------------------------------------------------------------------------------------

    def set_aside(self, held: set[nn.Parameter]) -> None:
        """Hide the gradients of offloaded shards that an optimizer holds."""
        self._aside = {}
        for shard in self.offloaded & held:
            if shard.grad is not None:
                self._aside[shard], shard.grad = shard.grad, None

    def taken(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that were set aside, except for shards that a closure has given new gradients since."""
        self._taken = {shard: gradient for shard, gradient in self._aside.items() if shard.grad is None}
        self._aside = {}
        return dict(self._taken)

    def forget_taken(self) -> None:
        """Drop the references to the gradients that ``taken`` returned; the caller owns them."""
        self._taken, self._noted = {}, {}

    def give_back(self) -> None:
        """Restore the ``grad`` of shards, which exists after a step of any optimizer."""
        for shard, gradient in self._taken.items():
            if shard.grad is None:
                shard.grad = gradient
        self._taken = {}


# Gradient offload: reduced gradients are copied to the host and become the gradients of the shards there --------------
#
# Note: two chunks in flight. A reduced slice is copied on the device to one of two small staging
# buffers, in the dtype of the shards, and from there to the host. If a buffer is still being copied
# to the host, its next use waits on the device. Thus the memory of the slice itself is free at once.
# At most two chunks occupy device memory, however slow the link to the host is.


ROOMS = 2
Memory = Callable[[int, torch.dtype], Tensor]


@dataclass(eq=False)
class _HostPool:
    """Staging buffer on the device, and the copy to the host that empties it."""

    memory: Tensor
    leaving: Arrival | None = None


class GradOffload:
    """Offload of gradient slices to memory from ``host``, in chunks of ``nbytes``; ``twice``: two buffers per slice.

    ``landed`` is called for each slice whose copy has started, ``before_adding`` before a slice is
    added to another.
    """

    def __init__(self, transfer: Transfer, host: Memory, device: torch.device, nbytes: int, *, twice: bool) -> None:
        self.host, self.twice = host, twice
        self._transfer, self._device, self._nbytes = transfer, device, nbytes
        self._rooms: list[_HostPool] = []
        self._spare: list[Tensor] = []
        self._users: list[GradOffloadReduction | None] = [None] * ROOMS
        self._largest = 0  # bytes per slice
        self._next_room = self._next_spare = 0
        self.landed: Callable[[GradOffloadReduction], None] = lambda flow: None
        self.before_adding: Callable[[], None] = lambda: None

    def flow(self, piece: ParamGroup, number: int, first: int, dtype: torch.dtype) -> GradOffloadReduction:
        """Return the flow of a group's gradients."""
        flow = GradOffloadReduction(piece, number, first, dtype)
        flow.landing = self
        self._largest = max(self._largest, piece.layout.share * piece.own.itemsize)
        return flow

    def bring(self, target: Tensor, source: Tensor) -> Arrival:
        """Copy a slice to the host, in the dtype of ``target``.

        The memory of ``source`` may be reused by work that is enqueued on the current stream
        afterwards.
        """
        step, arrival = max(self._nbytes // target.itemsize, 1), None
        for begin in range(0, target.numel(), step):
            part = target[begin : begin + step]
            room = self._room()
            memory = room.memory.view(target.dtype)[: part.numel()]
            memory.copy_(source[begin : begin + step])
            arrival = room.leaving = self._transfer.down(part, memory)
        assert arrival is not None, "no piece is empty"
        return arrival

    def _room(self) -> _HostPool:
        """Return the next staging buffer; subsequent work waits until it is empty."""
        if not self._rooms:
            size = -(-min(self._nbytes, self._largest) // 8) * 8
            self._rooms = [_HostPool(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(ROOMS)]
        room = self._rooms[self._next_room]
        self._next_room = (self._next_room + 1) % ROOMS
        if room.leaving is not None:
            room.leaving.join()
        return room

    def spare(self, flow: GradOffloadReduction) -> Tensor:
        """Return host memory for a slice to be added to another; the previous user first completes its addition."""
        number, self._next_spare = self._next_spare, (self._next_spare + 1) % ROOMS
        if (user := self._users[number]) is not None and user.adds:
            user.absorb()
        self._users[number] = flow
        nbytes = flow.piece.own.nbytes
        self._spare += [torch.empty(0, dtype=torch.uint8)] * (ROOMS - len(self._spare))
        if self._spare[number].numel() < nbytes:
            self._spare[number] = self.host(nbytes, torch.uint8)
        return self._spare[number][:nbytes].view(flow.piece.own.dtype)


class GradOffloadReduction(GroupReduction):
    """Flow of one group's gradients to the host; as in ``GroupReduction`` for a group that stays on the device."""

    landing: GradOffload
    arrival: Arrival | None = None
    _other: Tensor | None = None
    _adding: Tensor | None = None  # a slice that is to be added to the gradients of the shards
    _leaving: Tensor | None = None  # device memory of a slice, until the caller's stream has been joined

    @property
    def adds(self) -> bool:
        """Return whether a slice is to be added to existing gradients."""
        return self._adding is not None

    @property
    def _lands(self) -> bool:
        return self.piece.courier is not None

    def aim(self) -> Tensor:
        """Return device memory for this rank's slice; on a single rank, the unsharded gradients themselves."""
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
        """Start copying the slice to the host, and release it."""
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
        """Release the device memory; subsequent work is ordered after its use."""
        super().close()
        self._leaving = None

    @property
    def slice(self) -> Tensor:
        """Return the host memory of this group's gradients."""
        if self._slice is None:
            self._slice = self.landing.host(self.piece.layout.share, self.piece.own.dtype)
        return self._slice

    def turn(self) -> None:
        """Switch to the other host buffer, if there are two: the current one is still being read."""
        if self.landing.twice:
            self._slice, self._other = self._other, self._slice

    def absorb(self) -> None:
        """Wait for the slice, and add it to existing gradients."""
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
        """Assign the gradients to the shards; parameters not ``used`` on any rank keep the gradient that they had."""
        if not self._lands:
            super().hand_out(used)
            return
        self.absorb()
        for member, wanted in zip(self.piece.members, used):
            if wanted and member.shard.grad is None:
                member.shard.grad = held_in(self.slice, member.held, member.shape)
        self.arrived.clear()

    def stay_on_device(self) -> None:
        """Release the host memory; from now on gradients stay on the device."""
        self._slice = self._other = None
