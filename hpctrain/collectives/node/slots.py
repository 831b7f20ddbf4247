"""Hand tensors from one rank to another of its node: one writes them into shared memory, the other reads them there.

Note: a ring of slots. Writer and reader go round the same slots, each in its turn; two counters that only grow say how
many were filled, which only the writer writes, and how many were freed, which only the reader does. A slot belongs to
the reader from the moment it is filled until it is freed, so what lies there can be computed with, and kept for a
backward pass, without a copy. Neither ever waits here: both ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.collectives.node.shared import SharedMemory
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from hpctrain.transport.window import NodeMemory

LINE = 16  # int64s: two cache lines a counter, because processors fetch lines in pairs
COUNTERS = 2 * LINE  # int64s a ring
_BLOCK = 64  # bytes: slots begin where vector loads like it


@dataclass(frozen=True)
class Handover:
    """Say that one rank is to hand so many bytes to another, and how many times before the first is given back."""

    source: int
    target: int
    count: int
    nbytes: int

    @property
    def room(self) -> int:
        """Return the bytes of one slot."""
        return -(-max(self.nbytes, 1) // _BLOCK) * _BLOCK


class Slots:
    """Be one ring, on the rank that writes or on the rank that reads."""

    def __init__(self, memory: NodeMemory, flat: Tensor, counters: memoryview, handover: Handover) -> None:
        self._memory, self._counters, self._handover = memory, counters, handover
        self._slots: list[Tensor] = [
            # .data: what is written into one must not look to autograd like a change of the others.
            slot[: handover.nbytes].data
            for slot in flat.view(handover.count, handover.room)
        ]
        self._filled = self._taken = self._freed = 0

    def room(self) -> bool:
        """Tell the writer whether a slot is free."""
        return self._filled - self._counters[LINE] < len(self._slots)

    def next(self) -> Tensor:
        """Return the bytes of the free slot whose turn it is, to write into."""
        return self._slots[self._filled % len(self._slots)]

    def fill(self) -> None:
        """Give the slot that was written to the reader."""
        self._filled += 1
        if self._memory.recorder is not None:
            self._memory.recorder.count("handover", self._handover.nbytes)
        self._memory.fence()
        self._counters[0] = self._filled

    def ready(self) -> bool:
        """Tell the reader whether there is one that it has not taken."""
        return bool(self._counters[0] > self._taken)

    def take(self) -> Tensor:
        """Return the bytes of the oldest slot that was not taken; they stay the reader's until it is freed."""
        self._memory.fence()
        self._taken += 1
        return self._slots[(self._taken - 1) % len(self._slots)]

    def free(self) -> None:
        """Give the oldest slot that was taken back to the writer."""
        self._freed += 1
        self._memory.fence()
        self._counters[LINE] = self._freed


def make_slots(shared: SharedMemory, rank: int, wanted: Sequence[Handover]) -> list[Slots | None]:
    """Return this rank's end of every ring that was wanted, in order; a call by all ranks, who want the same.

    None where this rank is at neither end, or the two ends share no memory.
    """
    if not shared.exists:
        return [None] * len(wanted)
    node_of = {member: number for number, members in enumerate(shared.place.grid) for member in members}
    here = [each for each in wanted if node_of[each.source] == node_of[each.target] == node_of[rank]]
    offsets = [0]
    for each in here:
        offsets.append(offsets[-1] + COUNTERS * 8 + each.count * each.room)
    try:
        flat = shared.node.common(max(offsets[-1], 1), torch.uint8)  # of all ranks: nodes that want none, too
    except CommunicationError as error:
        if not shared.lacks_space(error):
            raise
        return [None] * len(wanted)
    rings: list[Slots | None] = []
    for each in wanted:
        if each not in here or rank not in (each.source, each.target):
            rings.append(None)
            continue
        number = next(place for place, other in enumerate(here) if other is each)
        begin = offsets[number] + COUNTERS * 8
        counters = memoryview(flat[offsets[number] : begin].numpy().data).cast("q")
        rings.append(Slots(shared.node.memory, flat[begin : offsets[number + 1]], counters, each))
    return rings
