"""Collectives of private tensors, staged through node memory in pieces.

Note: the pipeline of a node. Each rank has two slots of node memory, which alternate. Per piece, a
rank fills its slot with the data that the others need. All arrive, and each does its work on the
slots. In a gather, a broadcast, a reduce_scatter and the ``direct`` all_reduce the work completes the
piece: one meeting. In the ``shared`` all_reduce, rank r reduces part r of the piece and leaves the
result in its slot. All finish, and each rank copies the results of the others: two meetings. A rank
fills one slot before it empties the other, so ranks may be half a piece apart.

Why two slots suffice: a slot is refilled only after all have finished the piece that it contained.
Results are written only after all have arrived at the next piece but one, and each rank arrives
there after it has emptied the slot. After the last piece of a shared all_reduce all ranks register
once more, without waiting.

Note: size of the slots (float32 sums, medians in us; slots of 256 KiB, 1, 2, 4, 8 MiB; these figures and
those below are of a prototype, that of four ranks on a machine that was not quiet). Slots that
fit the caches are read from there, so main memory traffic is only that of the tensor itself, 2 S per
rank as in a window. Two ranks on two cores: 9,400, 6,900, 7,400, 20,900, 21,000 for 64 MiB. If there
are more ranks than cores, each meeting costs a round of the scheduler, which outweighs the caches:
four ranks on two cores: 1,010,000, 320,000, 170,000, 130,000, 115,000.

Note: direct or shared. Every rank reads (p - 1) S bytes of others in a direct all_reduce, and 2 S
(p-1)/p in a shared one, with twice the meetings. Two ranks, direct / shared: 13 / 14 us at 64 KiB, 68
/ 70 at 1 MiB, 450 / 430 at 4 MiB, 7,700 / 6,900 at 64 MiB. Four ranks on two cores: 2.0 / 4.6 ms at
64 KiB, 3.6 / 5.3 at 1 MiB, 10.5 / 8.1 at 4 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hpctrain.comm.reduction import BLOCK, Reducer, average_scale, reduces_in_place
from hpctrain.comm.shm.in_place import ALIGN, NodeQueue, Raw, copyto, raw
from hpctrain.comm.transport.base import PreparedCall
from hpctrain.comm.transport.reserve import NoSpaceError
from hpctrain.comm.transport.waiting import waiting
from hpctrain.comm.transport.window import ARRIVED, FINISHED, NodeMemory

SLOT = 2**18  # bytes of a slot, for short tensors and if /dev/shm has no space for larger slots
# By whether a node has more ranks than cores: bytes of a slot for longer tensors, and bytes that a
# rank may read in a direct all_reduce.
LARGE_SLOT = {False: 2**20, True: 2**22}
DIRECT_BYTES = {False: 2**20, True: 3 * 2**20}
# Torch computes these differently in the vectorized body and in the remainder of a loop (signed
# zeros, NaNs, complex products), so that ranks with other numbers of threads would get other bits.
_BY_ONE_RANK = ("min", "max", "product")


@dataclass(frozen=True)
class Piece:
    """Calls of this rank for one piece: before all arrive, after that, and after all have finished."""

    fill: Sequence[Callable[[], object]]
    work: Sequence[Callable[[], object]]
    empty: Sequence[Callable[[], object]] = ()


_MakePiece = Callable[[int, Sequence[Tensor]], Piece]  # arguments: number of the piece, and the slots of all ranks
Bounds = tuple[int, int]  # first element of a part, and the one after the last


class SlotPair:
    """Two slots per rank. Construction is collective."""

    def __init__(self, memory: NodeMemory, nbytes: int) -> None:
        buffer, offset = memory.allocate(2 * nbytes)
        self.nbytes = nbytes
        self.halves = [buffer.views(offset + half * nbytes, nbytes, torch.uint8) for half in (0, 1)]
        self.last_use = [0, 0]  # sequence number of the last operation that used each slot
        self.next = 0  # slot of the next piece


class StagedCollectives:
    """Blocking collectives of flat tensors in any host memory, on one node only.

    Methods return a prepared call, whose views are created once and reused. Construction is
    collective, and so is the first call for a tensor that is longer than the small slots.
    """

    def __init__(self, queue: NodeQueue, reducer: Reducer, *, oversubscribed: bool = False) -> None:
        self._queue = queue
        self._memory = queue.memory
        self._reducer = reducer
        self._rank, self._size = queue.memory.rank, queue.memory.size
        self._large_slot, self._direct_bytes = LARGE_SLOT[oversubscribed], DIRECT_BYTES[oversubscribed]
        self._small = SlotPair(queue.memory, SLOT)
        self._large: SlotPair | None = None

    def all_reduce(self, tensor: Tensor, op: str) -> PreparedCall:
        """Return a prepared call that reduces over all ranks, in place."""
        pair = self._pair(tensor.nbytes)
        exact = op not in _BY_ONE_RANK or not (tensor.is_floating_point() or tensor.is_complex())
        if exact and tensor.nbytes * (self._size - 1) <= self._direct_bytes:
            return self._direct_all_reduce(pair, tensor, op)
        return self._shared_all_reduce(pair, tensor, op)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> PreparedCall:
        """Return a prepared call that reduces over all ranks and stores this rank's share in ``out``."""
        pair, share, itemsize = self._pair(tensor.nbytes), out.numel(), out.itemsize
        step = _even_step(share, pair.nbytes // self._size // ALIGN * ALIGN // itemsize, itemsize)
        data, own = raw(tensor), tensor[self._rank * share : (self._rank + 1) * share]

        def piece(number: int, slots: Sequence[Tensor]) -> Piece:
            low, high = number * step, min((number + 1) * step, share)
            places = [(rank * step, rank * step + high - low) for rank in range(self._size)]
            target = raw(slots[self._rank])
            fill = [
                _copy(target, places[rank], data, (rank * share + low, rank * share + high), itemsize)
                for rank in self._others()
            ]
            inputs = self._inputs(own[low:high], slots, places[self._rank])
            return Piece(fill, self._reductions(out[low:high], inputs, op))

        return self._prepared("reduce_scatter", pair, -(-share // step), piece)

    def all_gather(self, out: Tensor, tensor: Tensor) -> PreparedCall:
        """Return a prepared call that concatenates the tensors of all ranks in ``out``."""
        pair, share, itemsize = self._pair(tensor.nbytes), tensor.numel(), tensor.itemsize
        step = _even_step(share, pair.nbytes // itemsize, itemsize)
        source, target = raw(tensor), raw(out)
        in_place = out.data_ptr() + self._rank * tensor.nbytes == tensor.data_ptr()

        def piece(number: int, slots: Sequence[Tensor]) -> Piece:
            low, high = number * step, min((number + 1) * step, share)
            own, place = (low, high), (0, high - low)
            parts = {rank: (rank * share + low, rank * share + high) for rank in range(self._size)}
            work = [_copy(target, parts[rank], raw(slots[rank]), place, itemsize) for rank in self._others()]
            if not in_place:
                work.append(_copy(target, parts[self._rank], source, own, itemsize))
            return Piece([_copy(raw(slots[self._rank]), place, source, own, itemsize)], work)

        return self._prepared("all_gather", pair, -(-share // step), piece)

    def broadcast(self, tensor: Tensor, root: int) -> PreparedCall:
        """Return a prepared call that copies the root's tensor to all ranks."""
        pair, itemsize = self._pair(tensor.nbytes), tensor.itemsize
        step = _even_step(tensor.numel(), pair.nbytes // itemsize, itemsize)
        data = raw(tensor)

        def piece(number: int, slots: Sequence[Tensor]) -> Piece:
            low, high = number * step, min((number + 1) * step, tensor.numel())
            slot, place = raw(slots[root]), (0, high - low)
            if self._rank == root:
                return Piece([_copy(slot, place, data, (low, high), itemsize)], ())
            return Piece((), [_copy(data, (low, high), slot, place, itemsize)])

        return self._prepared("broadcast", pair, -(-tensor.numel() // step), piece)

    # Reductions -------------------------------------------------------------------------------------------------------

    def _direct_all_reduce(self, pair: SlotPair, tensor: Tensor, op: str) -> PreparedCall:
        """Return a prepared call in which every rank reduces the whole tensor."""
        itemsize = tensor.itemsize
        step = _even_step(tensor.numel(), pair.nbytes // itemsize, itemsize)
        data = raw(tensor)

        def piece(number: int, slots: Sequence[Tensor]) -> Piece:
            low, high = number * step, min((number + 1) * step, tensor.numel())
            place, own = (0, high - low), tensor[low:high]
            fill = _copy(raw(slots[self._rank]), place, data, (low, high), itemsize)
            return Piece([fill], self._reductions(own, self._inputs(own, slots, place), op))

        return self._prepared("all_reduce", pair, -(-tensor.numel() // step), piece)

    def _shared_all_reduce(self, pair: SlotPair, tensor: Tensor, op: str) -> PreparedCall:
        """Return a prepared call in which every rank reduces its part of each piece."""
        numel, itemsize, size = tensor.numel(), tensor.itemsize, self._size
        part = _even_step(-(-numel // size), pair.nbytes // size // ALIGN * ALIGN // itemsize, itemsize)
        data = raw(tensor)

        def piece(number: int, slots: Sequence[Tensor]) -> Piece:
            begin = number * part * size
            parts = [(min(begin + r * part, numel), min(begin + (r + 1) * part, numel)) for r in range(size)]
            places = [(r * part, r * part + high - low) for r, (low, high) in enumerate(parts)]
            slot, own_place, own_part = raw(slots[self._rank]), places[self._rank], parts[self._rank]
            own = tensor[own_part[0] : own_part[1]]
            fill = [_copy(slot, places[r], data, parts[r], itemsize) for r in self._others()]
            work = [
                *self._reductions(own, self._inputs(own, slots, own_place), op),
                _copy(slot, own_place, data, own_part, itemsize),
            ]
            empty = [_copy(data, parts[r], raw(slots[r]), places[r], itemsize) for r in self._others()]
            return Piece(fill, work, empty)

        return self._prepared("all_reduce", pair, -(-numel // (part * size)), piece)

    def _inputs(self, own: Tensor, slots: Sequence[Tensor], place: Bounds) -> list[Tensor]:
        """Return a part of every rank, in rank order: this rank's tensor, and the others' in their slots."""
        low, high = place
        return [own if r == self._rank else slot.view(own.dtype)[low:high] for r, slot in enumerate(slots)]

    def _reductions(self, out: Tensor, inputs: Sequence[Tensor], op: str) -> list[Callable[[], object]]:
        """Return the calls that reduce parts of all ranks into ``out``, which may be one of them, block by block."""
        scale = average_scale(op, self._size)
        in_place = reduces_in_place(out.dtype, op, self._size)
        calls: list[Callable[[], object]] = []
        for start in range(0, out.numel(), BLOCK):
            target = out[start : start + BLOCK]
            result = target if in_place else self._reducer.scratch(out.dtype, target.numel())
            block = [tensor[start : start + BLOCK] for tensor in inputs]
            calls.append(partial(self._reducer.reduce_block, block, op, result, scale))
            if not in_place:
                calls.append(partial(target.copy_, result))
        return calls

    # Pieces -----------------------------------------------------------------------------------------------------------

    def _others(self) -> list[int]:
        """Return the other ranks; each rank begins with a different one, so that not all read the same slot at once."""
        return [(self._rank + distance) % self._size for distance in range(1, self._size)]

    def _pair(self, nbytes: int) -> SlotPair:
        """Return the slots for a tensor; the first call for a long one is collective."""
        if nbytes <= SLOT:
            return self._small
        if self._large is None:
            try:
                self._large = SlotPair(self._memory, self._large_slot)
            except NoSpaceError:  # raised on all ranks
                self._large = self._small
        return self._large

    def _prepared(self, operation: str, pair: SlotPair, pieces: int, make: _MakePiece) -> PreparedCall:
        """Return a prepared call; a single piece is prepared for both slots, as consecutive calls alternate."""
        if pieces == 1:
            sequences = [[make(0, half)] for half in pair.halves]
        else:
            sequences = [[make(number, pair.halves[number % 2]) for number in range(pieces)]]
        return partial(self._run, operation, pair, sequences)

    def _run(self, operation: str, pair: SlotPair, sequences: Sequence[Sequence[Piece]]) -> None:
        self._queue.drain()
        half = pair.next if len(sequences) == 2 else 0
        waiting.begin(operation)
        try:
            self._run_pieces(operation, pair, sequences[half], half)
        finally:
            waiting.end()

    def _run_pieces(self, operation: str, pair: SlotPair, pieces: Sequence[Piece], half: int) -> None:
        memory, number = self._memory, 0
        full: Sequence[Callable[[], object]] = ()
        for piece in pieces:
            memory.await_all(FINISHED, pair.last_use[half], operation)
            for call in piece.fill:
                call()
            before, number = number, memory.arrive()
            if full:
                memory.await_all(FINISHED, before, operation)
                for call in full:
                    call()
            memory.await_all(ARRIVED, number, operation)
            for call in piece.work:
                call()
            memory.finish(number)
            pair.last_use[half], half, full = number, 1 - half, piece.empty
        pair.next = half
        if full:
            memory.await_all(FINISHED, number, operation)
            for call in full:
                call()
            last = memory.arrive()
            memory.finish(last)
            pair.last_use[1 - half] = last
            if len(pieces) > 1:
                pair.last_use[half] = last


def _even_step(numel: int, most: int, itemsize: int) -> int:
    """Return the elements per piece: at most ``most``, in whole cache lines, and about as many in each piece."""
    align = max(ALIGN // itemsize, 1)
    pieces = max(-(-numel // most), 1)
    return min(-(-numel // (pieces * align)) * align, most)


def _copy(target: Raw, to: Bounds, source: Raw, part: Bounds, itemsize: int) -> Callable[[], object]:
    """Return the call that copies elements between two arrays of bytes."""
    return partial(copyto, target[to[0] * itemsize : to[1] * itemsize], source[part[0] * itemsize : part[1] * itemsize])
