"""Ring buffers in node-shared memory: one rank writes tensors, another rank of the node reads them in place.

Note: single-producer, single-consumer ring. Writer and reader use the same slots in turn. Two
monotonic counters hold the number of filled slots, written by the writer only, and of freed slots,
written by the reader only. A slot belongs to the reader from the moment it is filled until it is
freed. Its content can therefore be used in computations, and be kept for a backward pass, without a
copy. Neither side blocks here: both poll.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.shm.memory import SharedMemory
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from hpctrain.comm.transport.window import NodeMemory

LINE = 16  # int64s: two cache lines per counter, because processors fetch lines in pairs
COUNTERS = 2 * LINE  # int64s per ring
_BLOCK = 64  # bytes: alignment of slots, for vector loads


@dataclass(frozen=True)
class RingHandle:
    """Ring specification: source and target rank, bytes per slot, and number of slots."""

    source: int
    target: int
    count: int
    nbytes: int

    @property
    def slot_bytes(self) -> int:
        """Return the size of one slot in bytes, a multiple of the alignment."""
        return -(-max(self.nbytes, 1) // _BLOCK) * _BLOCK


class SpscRing:
    """One ring buffer, on the writer's or the reader's rank."""

    def __init__(self, memory: NodeMemory, flat: Tensor, counters: memoryview, handle: RingHandle) -> None:
        self._memory, self._counters, self._handle = memory, counters, handle
        self._slots: list[Tensor] = [
            # .data: for autograd, a write into one slot must not count as a change of the others.
            slot[: handle.nbytes].data
            for slot in flat.view(handle.count, handle.slot_bytes)
        ]
        self._filled = self._taken = self._freed = 0

    def has_free_slot(self) -> bool:
        """Return whether a slot is free (writer)."""
        return self._filled - self._counters[LINE] < len(self._slots)

    def next(self) -> Tensor:
        """Return the bytes of the next free slot, to write into."""
        return self._slots[self._filled % len(self._slots)]

    def fill(self) -> None:
        """Publish the written slot to the reader."""
        self._filled += 1
        if self._memory.recorder is not None:
            self._memory.recorder.count("handover", self._handle.nbytes)
        self._memory.fence()
        self._counters[0] = self._filled

    def ready(self) -> bool:
        """Return whether there is a filled slot that was not taken yet (reader)."""
        return bool(self._counters[0] > self._taken)

    def take(self) -> Tensor:
        """Return the bytes of the oldest slot that was not taken; they belong to the reader until the slot is freed."""
        self._memory.fence()
        self._taken += 1
        return self._slots[(self._taken - 1) % len(self._slots)]

    def free(self) -> None:
        """Return the oldest taken slot to the writer."""
        self._freed += 1
        self._memory.fence()
        self._counters[LINE] = self._freed


def make_slots(shared: SharedMemory, rank: int, wanted: Sequence[RingHandle]) -> list[SpscRing | None]:
    """Return this rank's end of every requested ring, in order; all ranks pass the same list. Collective.

    An entry is None if this rank is at neither end, or if the two ends share no memory.
    """
    if not shared.exists:
        return [None] * len(wanted)
    node_of = {member: number for number, members in enumerate(shared.topology.grid) for member in members}
    here = [each for each in wanted if node_of[each.source] == node_of[each.target] == node_of[rank]]
    offsets = list(accumulate((COUNTERS * 8 + each.count * each.slot_bytes for each in here), initial=0))
    try:
        flat = shared.node.common(max(offsets[-1], 1), torch.uint8)  # collective, also for nodes without rings
    except CommunicationError as error:
        if not shared.lacks_space(error):
            raise
        return [None] * len(wanted)
    rings: list[SpscRing | None] = []
    for each in wanted:
        if each not in here or rank not in (each.source, each.target):
            rings.append(None)
            continue
        number = next(index for index, other in enumerate(here) if other is each)
        begin = offsets[number] + COUNTERS * 8
        counters = memoryview(flat[offsets[number] : begin].numpy().data).cast("q")
        rings.append(SpscRing(shared.node.memory, flat[begin : offsets[number + 1]], counters, each))
    return rings
