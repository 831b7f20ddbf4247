"""Take device tensors through host memory, in pieces, so that copies and host operation run at the same time.

Note: the staging pipeline. Two slots of pinned memory take turns. While the host works on piece k in one slot, one
stream copies piece k + 1 into the other slot and another stream copies piece k - 1 out of it. Three rules keep them
apart: a copy into a slot waits, on its stream, for the copy out of the slot that was there before (piece k - 2, or the
run before); the host waits for the copy in of piece k before it operates; a copy out is given to its stream after the
host has operated. Both streams first wait for what the caller's stream has computed, and the caller's stream waits for
the last copy out, so that the result can be used like that of any kernel. Cost: one piece in, one piece out, and in
between the slowest of the three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.transport.pieces import Piece
from hpctrain.transport.streams import Streams

PIECE_BYTES = 8 * 2**20  # long enough for full speed of the bus, short enough that the first and last copy cost little

# Operates on one piece: (host memory to write, host memory to read); the same tensor where it works in place.
HostOperation = Callable[[Tensor, Tensor], None]


class _Slot:
    """Hold the pinned memory of one piece under way, and the event after which it may be filled again."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._memory: dict[str, Tensor] = {}
        self.emptied: Any = None

    def memory(self, which: str, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return room for the parts behind each other."""
        nbytes = sum(part.numel() for part in parts) * dtype.itemsize
        held = self._memory.get(which)
        if held is None or held.numel() < nbytes:
            if self.emptied is not None:
                self._streams.synchronize(self.emptied)
            held = self._memory[which] = self._streams.pinned(max(nbytes, 64))
        return held[:nbytes].view(dtype)


class StagedCopier:
    """Run host operations on device tensors; one run at a time."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._inward = streams.new()
        self._outward = streams.new()
        self._slots = (_Slot(streams), _Slot(streams))

    def run(self, pieces: Sequence[Piece], operation: HostOperation, dtype: torch.dtype) -> None:
        """Operate on all pieces in order; the caller's stream waits for the results, the host for the inputs only."""
        streams = self._streams
        computed = streams.record(streams.current())
        for stream in (self._inward, self._outward):
            streams.wait(stream, computed)
        try:
            ahead = self._copy_in(0, pieces[0], dtype)
            for index, piece in enumerate(pieces):
                (source, target, arrived), following = ahead, index + 1
                if following < len(pieces):
                    ahead = self._copy_in(following, pieces[following], dtype)
                streams.synchronize(arrived)
                operation(target, source)
                self._copy_out(index, piece, target)
        finally:
            # The inward stream too: after an error it may still read what the caller is about to free.
            for stream in (self._inward, self._outward):
                streams.wait(streams.current(), streams.record(stream))

    def _copy_in(self, index: int, piece: Piece, dtype: torch.dtype) -> tuple[Tensor, Tensor, Any]:
        slot = self._slots[index % 2]
        source = slot.memory("in", piece.inputs, dtype)
        target = source if piece.in_place else slot.memory("out", piece.outputs, dtype)
        if slot.emptied is not None:
            self._streams.wait(self._inward, slot.emptied)
        for part, place in zip(piece.inputs, _places(source, piece.inputs)):
            self._streams.copy(place, part, self._inward)
        return source, target, self._streams.record(self._inward)

    def _copy_out(self, index: int, piece: Piece, target: Tensor) -> None:
        for part, place in zip(piece.outputs, _places(target, piece.outputs)):
            self._streams.copy(part, place, self._outward)
        self._slots[index % 2].emptied = self._streams.record(self._outward)


def _places(memory: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.split(memory, [part.numel() for part in parts]) if parts else ()
