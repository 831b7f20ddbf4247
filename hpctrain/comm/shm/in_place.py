"""Collectives in place in node-shared memory, and the queue in which the ranks of a node do their parts.

All ranks start the same operations in the same order. Each rank does its part of an operation once
all ranks have started it. An operation may remain in progress: it
progresses whenever any pending operation is polled, so a rank that arrives late finds the others at
work instead of waiting. A part that must wait for another node yields its ``Work`` and remains in
progress too. A rank that blocked there would delay the collective that the other node is executing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpctrain.comm.reduction import BLOCK, Reducer, average_scale, reduces_in_place
from hpctrain.comm.transport.base import Chain, Recordable, Work
from hpctrain.comm.transport.waiting import waiting
from hpctrain.comm.transport.window import ARRIVED, FINISHED, NodeMemory

# Part of one rank, called once all ranks have arrived; yields each ``Work`` that it must wait for.
LocalPart = Callable[[], Iterator[Work] | None]


class NodeQueue:
    """Queue that starts and progresses the operations of one node."""

    def __init__(self, memory: NodeMemory) -> None:
        self.memory = memory
        self._pending: deque[_PendingOperation] = deque()

    def start(self, operation: str, part: LocalPart, *held: object) -> Work:
        """Start an operation and leave it in progress; keep ``held`` alive until it completes."""
        pending = _PendingOperation(self, operation, part, self.memory.arrive(), held)
        self._pending.append(pending)
        return pending

    def run(self, operation: str, part: LocalPart) -> None:
        """Execute an operation; return when all ranks have done their parts."""
        if self._pending:
            self.start(operation, part).wait()
            return
        memory = self.memory
        number = memory.arrive()
        waiting.begin(operation)
        try:
            memory.await_all(ARRIVED, number, operation)
            works = part()
            if works is not None:
                for work in works:
                    work.wait()
            memory.finish(number)
            memory.await_all(FINISHED, number, operation)
        finally:
            waiting.end()

    def synchronize(self, operation: str) -> None:
        """Wait until all ranks have arrived and have done their parts of all earlier operations."""
        self.drain()
        number = self.memory.arrive()
        self.memory.finish(number)
        with waiting(operation):
            self.memory.await_all(ARRIVED, number, operation)

    def drain(self) -> None:
        """Complete all pending operations."""
        while self._pending:
            self._pending[-1].wait()

    def progress(self) -> None:
        """Do this rank's part of every operation that all ranks have started; do not block."""
        while self._pending and self.memory.reached(ARRIVED, self._pending[0].number):
            first = self._pending[0]
            with waiting(first.operation):
                if not first.advance():
                    return
            self.memory.finish(self._pending.popleft().number)


class _PendingOperation:
    """Operation in progress (``Work``)."""

    def __init__(
        self, queue: NodeQueue, operation: str, part: LocalPart, number: int, held: tuple[object, ...]
    ) -> None:
        self._queue = queue
        self._part = part
        self._held = held
        self._works: Chain | None = None
        self._started = False
        self.operation = operation
        self.number = number

    def advance(self) -> bool:
        """Do what can be done of this rank's part; return whether the part is complete."""
        if not self._started:
            self._started = True
            works = self._part()
            self._works = None if works is None else Chain(works)
        return self._works is None or self._works.done()

    def done(self) -> bool:
        """Progress without blocking; return whether all ranks have done their parts."""
        self._queue.progress()
        return self._queue.memory.reached(FINISHED, self.number)

    def wait(self) -> None:
        """Return when all ranks have done their parts."""
        self._queue.memory.wait(self.done, self.operation, self.number)


# Collectives on tensors in place: every rank maps all buffers of its node, so no data are sent ------------------------
#
# Note: the in-place window reduction. All ranks arrive; rank r reduces slice r of all buffers, one
# block at a time, and writes the result back into all of them; all ranks finish. Each rank accesses
# 2 S bytes (S read, S written) for any number of ranks p, whereas a ring moves 2 S (p-1)/p through
# memory four times. Cost: two synchronisations + 2 S / B, with B the streaming rate of one core. The
# synchronisations are those of ``transport.window``, so the operation can remain in progress.
#
# The other collectives follow the same pattern, and each keeps all p cores of the node busy:
#
# * reduce: as above, but slice r is written to the root's buffer only. 2 S/p + S (p-1)/p bytes per
#   rank.
# * reduce_scatter: rank r reduces slice r of all buffers into its own share. S read, S/p written per
#   rank.
# * all_gather: every rank copies its share into all other buffers, 2 S (p-1)/p bytes per rank. If all
#   shares are in one common tensor, it copies nothing.
# * broadcast: rank r copies slice r of the root's buffer to all others, S/p read and S (p-1)/p
#   written per rank.
#
# The methods below return one rank's part of an operation (``LocalPart``), bound to the views that
# it needs: creating these costs more than reducing a small tensor.


ALIGN = 64  # bytes: slices end on cache lines, to avoid false sharing between ranks

Raw = npt.NDArray[np.uint8]
copyto = np.copyto  # costs half as much per call as torch's copy


def raw(tensor: Tensor) -> Raw:
    """Return the bytes of a contiguous host tensor as an array, for copies."""
    return tensor.view(torch.uint8).numpy()


def bounds(numel: int, itemsize: int, rank: int, size: int) -> tuple[int, int]:
    """Return the start and the end of a rank's slice."""
    align = max(ALIGN // itemsize, 1)
    share = -(-numel // (size * align)) * align
    low = min(rank * share, numel)
    return low, min(low + share, numel)


class WindowParts:
    """Work of local rank ``rank`` of ``size``; ``views`` are one tensor, as seen in every local rank's buffer."""

    def __init__(self, rank: int, size: int, counted: Recordable, reducer: Reducer) -> None:
        self.rank = rank
        self.size = size
        self.reducer = reducer
        self._counted = counted

    def all_reduce(self, views: Sequence[Tensor], op: str) -> LocalPart:
        """Reduce this rank's slice and write the result into all buffers."""
        pieces = self.slices(views)
        own = pieces[self.rank]
        others = [piece for piece in pieces if piece is not own]
        return self._reducing(pieces, op, own, others, len(others) * own.nbytes)

    def reduce(self, views: Sequence[Tensor], op: str, root: int) -> LocalPart:
        """Reduce this rank's slice and write the result into the root's buffer."""
        pieces = self.slices(views)
        return self._reducing(pieces, op, pieces[root], [], 0 if root == self.rank else pieces[root].nbytes)

    def reduce_scatter(self, out: Tensor, views: Sequence[Tensor], op: str) -> LocalPart:
        """Reduce this rank's slice, of ``out.numel()`` elements, into ``out``."""
        low = self.rank * out.numel()
        return self._reducing([view[low : low + out.numel()] for view in views], op, out, [], 0)

    def all_gather(self, outs: Sequence[Tensor], tensor: Tensor) -> LocalPart:
        """Copy this rank's tensor to its position in every local rank's ``out``."""
        low = self.rank * tensor.numel()
        targets = [out[low : low + tensor.numel()] for out in outs]
        # Each rank starts with a different target, so that no two ranks write into the same memory
        # at once.
        return self.copying([(tensor, targets[self.rank :] + targets[: self.rank])])

    def broadcast(self, views: Sequence[Tensor], root: int) -> LocalPart:
        """Copy this rank's slice of the root's buffer into all others."""
        pieces = self.slices(views)
        return self.copying([(pieces[root], [piece for rank, piece in enumerate(pieces) if rank != root])])

    # Building blocks, also used by operations over several nodes ------------------------------------------------------

    def slices(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's slice of every view."""
        low, high = bounds(views[0].numel(), views[0].itemsize, self.rank, self.size)
        return [view[low:high] for view in views]

    def _reducing(
        self, pieces: Sequence[Tensor], op: str, target: Tensor, others: Sequence[Tensor], nbytes: int
    ) -> LocalPart:
        """Return a part that reduces pieces into a target and copies the target to others, block by block."""
        reduce_block, scratch, scale = self.reducer.reduce_block, self.reducer.scratch, average_scale(op, self.size)
        in_place = reduces_in_place(target.dtype, op, len(pieces))
        rows = zip(*(torch.split(tensor, BLOCK) for tensor in (*pieces, target, *others)))
        blocks = [
            (row[: self.size], row[self.size], raw(row[self.size]), [raw(copy) for copy in row[self.size + 1 :]])
            for row in rows
        ]

        def part() -> None:
            for block, goal, source, copies in blocks:
                result = goal if in_place else scratch(goal.dtype, goal.numel())
                reduce_block(block, op, result, scale)
                if not in_place:
                    goal.copy_(result)
                for copy in copies:
                    copyto(copy, source)
            self.count(nbytes)

        return part

    def copying(self, copies: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> LocalPart:
        """Return a part that copies each source to its targets, block by block."""
        blocks: list[tuple[Raw, Raw]] = []
        for source, targets in copies:
            others = [target for target in targets if target.data_ptr() != source.data_ptr()]
            for block, *pieces in zip(torch.split(source, BLOCK), *(torch.split(target, BLOCK) for target in others)):
                blocks += [(raw(piece), raw(block)) for piece in pieces]
        nbytes = sum(target.nbytes for target, _ in blocks)

        def part() -> None:
            for target, source in blocks:
                copyto(target, source)
            self.count(nbytes)

        return part

    def count(self, nbytes: int) -> None:
        """Count bytes that were written into node memory."""
        if self._counted.recorder is not None:
            self._counted.recorder.count("window", nbytes)
