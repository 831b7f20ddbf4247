"""Collectives of private tensors, staged through node memory in pieces that fit the cores' caches.

Note: the staging pipeline of a node. Each rank has two slots of node memory, which alternate. Per
piece, a rank fills its slot with the data that the others need. All arrive, each does its work on
the slots, all finish. If results remain in the slots, each rank then copies them out. A rank fills
one slot before it empties the other, so ranks may be half a piece apart.

Why two slots suffice: a slot is refilled only after all have finished the piece that it contained.
Results are written only after all have arrived at the next piece but one, and each rank arrives
there after it has emptied the slot. After the last piece all ranks register once more, without
waiting.

Slots are read from the caches. Main memory traffic is only that of the tensor itself, 2 S per rank
as in a window; about as many bytes move from cache to cache. Cost: two synchronisations per piece +
2 S / B + 2 S (p-1)/p / C, with B the streaming rate of a core from memory and C from the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hpctrain.comm.reduction import BLOCK, Reducer, average_scale, reduces_in_place
from hpctrain.comm.shm.in_place import ALIGN, NodeQueue
from hpctrain.comm.transport.base import PreparedCall
from hpctrain.comm.transport.waiting import waiting
from hpctrain.comm.transport.window import ARRIVED, FINISHED

SLOT = 2**18  # bytes: two slots and the buffer for their reduction fit a core's second-level cache

Parts = Sequence[Tensor]
_PieceStep = Callable[
    [int, Sequence[Parts]], None
]  # arguments: number of the piece, and the slots of all ranks, in parts


class StagedCollectives:
    """Blocking collectives of flat tensors in any host memory, on one node only.

    Methods return a prepared call, whose views are created once and reused.
    """

    def __init__(self, queue: NodeQueue, reducer: Reducer) -> None:
        self._queue = queue
        self._memory = queue.memory
        self._reducer = reducer
        self._rank, self._size = queue.memory.rank, queue.memory.size
        buffer, offset = queue.memory.allocate(2 * SLOT)
        self._halves = [buffer.views(offset + half * SLOT, SLOT, torch.uint8) for half in (0, 1)]
        self._parts: dict[tuple[torch.dtype, int], list[list[Parts]]] = {}
        self._last_use = [0, 0]  # sequence number of the last operation that used each slot

    def all_reduce(self, tensor: Tensor, op: str) -> PreparedCall:
        """Return a prepared call that reduces over all ranks, in place."""
        share = self._share(tensor.dtype)
        own_parts = _padded(torch.split(tensor, share), self._size)
        own_rank, size = self._rank, self._size

        def fill(number: int, slots: Sequence[Parts]) -> None:
            for rank in range(size):
                if rank != own_rank:
                    _fill_slot(slots[own_rank][rank], own_parts[number * size + rank])

        def work(number: int, slots: Sequence[Parts]) -> None:
            own = own_parts[number * size + own_rank]
            self._reduce(own, slots, own, op)
            _fill_slot(slots[own_rank][own_rank], own)

        def empty(number: int, slots: Sequence[Parts]) -> None:
            for rank in range(size):
                if rank != own_rank:
                    _empty_slot(own_parts[number * size + rank], slots[rank][rank])

        slots = self._slots(tensor.dtype, size)
        return partial(self._run, "all_reduce", len(own_parts) // size, slots, fill, work, empty)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> PreparedCall:
        """Return a prepared call that reduces over all ranks and stores this rank's share in ``out``."""
        share = self._share(tensor.dtype)
        own_parts, results = [torch.split(part, share) for part in tensor.view(self._size, -1)], torch.split(out, share)
        own_rank = self._rank

        def fill(number: int, slots: Sequence[Parts]) -> None:
            for rank, parts in enumerate(own_parts):
                if rank != own_rank:
                    _fill_slot(slots[own_rank][rank], parts[number])

        def work(number: int, slots: Sequence[Parts]) -> None:
            self._reduce(results[number], slots, own_parts[own_rank][number], op)

        return partial(self._run, "reduce_scatter", len(results), self._slots(tensor.dtype, self._size), fill, work)

    def all_gather(self, out: Tensor, tensor: Tensor) -> PreparedCall:
        """Return a prepared call that concatenates the tensors of all ranks in ``out``."""
        step = SLOT // tensor.itemsize
        own_parts, targets = torch.split(tensor, step), [torch.split(part, step) for part in out.view(self._size, -1)]

        def fill(number: int, slots: Sequence[Parts]) -> None:
            _fill_slot(slots[self._rank][0], own_parts[number])

        def work(number: int, slots: Sequence[Parts]) -> None:
            for rank, parts in enumerate(targets):
                if rank != self._rank:
                    _empty_slot(parts[number], slots[rank][0])
                elif parts[number].data_ptr() != own_parts[number].data_ptr():
                    parts[number].copy_(own_parts[number])

        return partial(self._run, "all_gather", len(own_parts), self._slots(tensor.dtype, 1), fill, work)

    def broadcast(self, tensor: Tensor, root: int) -> PreparedCall:
        """Return a prepared call that copies the root's tensor to all ranks."""
        own_parts = torch.split(tensor, SLOT // tensor.itemsize)

        def fill(number: int, slots: Sequence[Parts]) -> None:
            if self._rank == root:
                _fill_slot(slots[root][0], own_parts[number])

        def work(number: int, slots: Sequence[Parts]) -> None:
            if self._rank != root:
                _empty_slot(own_parts[number], slots[root][0])

        return partial(self._run, "broadcast", len(own_parts), self._slots(tensor.dtype, 1), fill, work)

    # Implementation ---------------------------------------------------------------------------------------------------

    def _run(
        self,
        operation: str,
        pieces: int,
        slots: Sequence[Sequence[Parts]],
        fill: _PieceStep,
        work: _PieceStep,
        empty: _PieceStep | None = None,
    ) -> None:
        self._queue.drain()
        memory, number = self._memory, 0
        with waiting(operation):
            for piece in range(pieces):
                half = piece % 2
                memory.await_all(FINISHED, self._last_use[half], operation)
                fill(piece, slots[half])
                before, number = number, memory.arrive()
                if empty is not None and piece:
                    memory.await_all(FINISHED, before, operation)
                    empty(piece - 1, slots[1 - half])
                memory.await_all(ARRIVED, number, operation)
                work(piece, slots[half])
                memory.finish(number)
                self._last_use[half] = number
            if empty is not None:
                memory.await_all(FINISHED, number, operation)
                empty(pieces - 1, slots[(pieces - 1) % 2])
            last = memory.arrive()
            memory.finish(last)
            self._last_use = [last, last]

    def _reduce(self, out: Tensor, slots: Sequence[Parts], own: Tensor, op: str) -> None:
        """Reduce this rank's part of all slots into ``out``; its own data replace those of its own slot."""
        own_rank, numel = self._rank, out.numel()
        pieces = [own if rank == own_rank else _cut(parts[own_rank], numel) for rank, parts in enumerate(slots)]
        in_place = reduces_in_place(out.dtype, op, self._size)
        result = out if in_place else self._reducer.scratch(out.dtype, numel)
        self._reducer.reduce_block(pieces, op, result, average_scale(op, self._size))
        if not in_place:
            out.copy_(result)

    def _share(self, dtype: torch.dtype) -> int:
        """Return the number of elements of a slot that one rank works on: whole cache lines, at most a block."""
        return min(SLOT // self._size // ALIGN * ALIGN // dtype.itemsize, BLOCK)

    def _slots(self, dtype: torch.dtype, parts: int) -> list[list[Parts]]:
        """Return both slots of every rank, split into ``parts``."""
        found = self._parts.get((dtype, parts))
        if found is None:
            step = self._share(dtype) if parts > 1 else SLOT // dtype.itemsize
            found = self._parts[dtype, parts] = [
                [torch.split(slot.view(dtype), step) for slot in half] for half in self._halves
            ]
        return found


def _padded(parts: Sequence[Tensor], size: int) -> Sequence[Tensor]:
    """Return the parts, padded with empty ones so that every piece has one part per rank."""
    return [*parts, *[parts[0][:0]] * (-len(parts) % size)]


def _cut(slot: Tensor, numel: int) -> Tensor:
    return slot if slot.numel() == numel else slot[:numel]


def _fill_slot(slot: Tensor, part: Tensor) -> None:
    _cut(slot, part.numel()).copy_(part)


def _empty_slot(part: Tensor, slot: Tensor) -> None:
    part.copy_(_cut(slot, part.numel()))
