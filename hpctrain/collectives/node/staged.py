"""Take tensors of a rank's own memory through node memory, in pieces that stay in the cores' caches.

Note: the staging pipeline of a node. Each rank has two slots of node memory, which take turns. Per piece a rank fills
its slot with what the others need, all arrive, each does its work on what lies there, all finish; where that leaves
results in the slots, each empties them. A rank fills one slot before it empties the other, so ranks may be half a piece
apart. Why two slots suffice: a slot is filled again after all have finished the piece that was there, and results are
written after all have arrived at the next piece but one, which each does after it has emptied the slot; after the last
piece all meet once more, but nobody waits there. Slots are read from the caches: of main memory only the tensor itself
is read and written, 2 S a rank as in a window; about as much goes from cache to cache. Cost: two meetings a piece +
2 S / B + 2 S (p-1)/p / C, with B the streaming rate of a core from memory and C from the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpctrain.collectives.node.queue import NodeQueue
from hpctrain.collectives.node.window import ALIGN
from hpctrain.collectives.reduction import BLOCK, Reducer, average_scale, reduces_straight
from hpctrain.transport.activity import waiting

SLOT = 2**18  # bytes: two of them and what they are reduced into fit a core's second-level cache

Parts = Sequence[Tensor]
Way = Callable[[], object]
_Turn = Callable[[int, Sequence[Parts]], None]  # of a piece's number and every rank's slot, in parts


class StagedCollectives:
    """Carry out collectives of flat tensors in any host memory; they block. On one node only.

    Methods return a way to carry an operation out, whose views are made once and used often.
    """

    def __init__(self, queue: NodeQueue, reducer: Reducer) -> None:
        self._queue = queue
        self._memory = queue.memory
        self._reducer = reducer
        self._rank, self._size = queue.memory.rank, queue.memory.size
        buffer, offset = queue.memory.allocate(2 * SLOT)
        self._halves = [buffer.views(offset + half * SLOT, SLOT, torch.uint8) for half in (0, 1)]
        self._parts: dict[tuple[torch.dtype, int], list[list[Parts]]] = {}
        self._used = [0, 0]  # the number of the operation that used a slot last

    def all_reduce(self, tensor: Tensor, op: str) -> Way:
        """Return the way to reduce over all ranks, in place."""
        share = self._share(tensor.dtype)
        mine = _padded(torch.split(tensor, share), self._size)
        me, size = self._rank, self._size

        def fill(number: int, slots: Sequence[Parts]) -> None:
            for rank in range(size):
                if rank != me:
                    _put(slots[me][rank], mine[number * size + rank])

        def work(number: int, slots: Sequence[Parts]) -> None:
            own = mine[number * size + me]
            self._reduce(own, slots, own, op)
            _put(slots[me][me], own)

        def empty(number: int, slots: Sequence[Parts]) -> None:
            for rank in range(size):
                if rank != me:
                    _get(mine[number * size + rank], slots[rank][rank])

        return self._way("all_reduce", len(mine) // size, self._slots(tensor.dtype, size), fill, work, empty)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Way:
        """Return the way to reduce over all ranks and keep this rank's share in ``out``."""
        share = self._share(tensor.dtype)
        mine, results = [torch.split(part, share) for part in tensor.view(self._size, -1)], torch.split(out, share)
        me = self._rank

        def fill(number: int, slots: Sequence[Parts]) -> None:
            for rank, parts in enumerate(mine):
                if rank != me:
                    _put(slots[me][rank], parts[number])

        def work(number: int, slots: Sequence[Parts]) -> None:
            self._reduce(results[number], slots, mine[me][number], op)

        return self._way("reduce_scatter", len(results), self._slots(tensor.dtype, self._size), fill, work)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Way:
        """Return the way to put the tensors of all ranks behind each other in ``out``."""
        step = SLOT // tensor.itemsize
        mine, places = torch.split(tensor, step), [torch.split(part, step) for part in out.view(self._size, -1)]

        def fill(number: int, slots: Sequence[Parts]) -> None:
            _put(slots[self._rank][0], mine[number])

        def work(number: int, slots: Sequence[Parts]) -> None:
            for rank, parts in enumerate(places):
                if rank != self._rank:
                    _get(parts[number], slots[rank][0])
                elif parts[number].data_ptr() != mine[number].data_ptr():
                    parts[number].copy_(mine[number])

        return self._way("all_gather", len(mine), self._slots(tensor.dtype, 1), fill, work)

    def broadcast(self, tensor: Tensor, root: int) -> Way:
        """Return the way to copy the root's tensor to all ranks."""
        mine = torch.split(tensor, SLOT // tensor.itemsize)

        def fill(number: int, slots: Sequence[Parts]) -> None:
            if self._rank == root:
                _put(slots[root][0], mine[number])

        def work(number: int, slots: Sequence[Parts]) -> None:
            if self._rank != root:
                _get(mine[number], slots[root][0])

        return self._way("broadcast", len(mine), self._slots(tensor.dtype, 1), fill, work)

    # How --------------------------------------------------------------------------------------------------------------

    def _way(
        self,
        operation: str,
        pieces: int,
        slots: Sequence[Sequence[Parts]],
        fill: _Turn,
        work: _Turn,
        empty: _Turn | None = None,
    ) -> Way:
        return lambda: self._run(operation, pieces, slots, fill, work, empty)

    def _run(
        self,
        operation: str,
        pieces: int,
        slots: Sequence[Sequence[Parts]],
        fill: _Turn,
        work: _Turn,
        empty: _Turn | None,
    ) -> None:
        self._queue.drain()
        memory, number = self._memory, 0
        with waiting(operation):
            for piece in range(pieces):
                half = piece % 2
                memory.await_finished(self._used[half], operation)
                fill(piece, slots[half])
                before, number = number, memory.arrive()
                if empty is not None and piece:
                    memory.await_finished(before, operation)
                    empty(piece - 1, slots[1 - half])
                memory.await_arrived(number, operation)
                work(piece, slots[half])
                memory.finish(number)
                self._used[half] = number
            if empty is not None:
                memory.await_finished(number, operation)
                empty(pieces - 1, slots[(pieces - 1) % 2])
            last = memory.arrive()
            memory.finish(last)
            self._used = [last, last]

    def _reduce(self, out: Tensor, slots: Sequence[Parts], own: Tensor, op: str) -> None:
        """Reduce this rank's part of all slots, in which its own piece takes its place, into ``out``."""
        me, numel = self._rank, out.numel()
        pieces = [own if rank == me else _cut(parts[me], numel) for rank, parts in enumerate(slots)]
        straight = reduces_straight(out.dtype, op, self._size)
        result = out if straight else self._reducer.scratch(out.dtype, numel)
        self._reducer.reduce_block(pieces, op, result, average_scale(op, self._size))
        if not straight:
            out.copy_(result)

    def _share(self, dtype: torch.dtype) -> int:
        """Return the elements of a slot that one rank works on: whole cache lines, a block at most."""
        return min(SLOT // self._size // ALIGN * ALIGN // dtype.itemsize, BLOCK)

    def _slots(self, dtype: torch.dtype, parts: int) -> list[list[Parts]]:
        """Return both slots of every rank, in so many parts."""
        found = self._parts.get((dtype, parts))
        if found is None:
            step = self._share(dtype) if parts > 1 else SLOT // dtype.itemsize
            found = self._parts[dtype, parts] = [
                [torch.split(slot.view(dtype), step) for slot in half] for half in self._halves
            ]
        return found


def _padded(parts: Sequence[Tensor], size: int) -> Sequence[Tensor]:
    """Return the parts with empty ones behind them, so that every piece has one for each rank."""
    return [*parts, *[parts[0][:0]] * (-len(parts) % size)]


def _cut(slot: Tensor, numel: int) -> Tensor:
    return slot if slot.numel() == numel else slot[:numel]


def _put(slot: Tensor, part: Tensor) -> None:
    _cut(slot, part.numel()).copy_(part)


def _get(part: Tensor, slot: Tensor) -> None:
    part.copy_(_cut(slot, part.numel()))
