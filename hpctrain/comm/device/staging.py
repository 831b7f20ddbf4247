"""Staging of device tensors through host memory in pieces, with overlap of copies and host operation.

Note: the staging pipeline. Two slots of pinned memory alternate. While the host works on piece k in
one slot, one stream copies piece k + 1 into the other slot and another stream copies piece k - 1
out of it. Three rules keep them apart:

* A copy into a slot waits, on its stream, for the copy out of the slot's previous content
  (piece k - 2, or the previous run).
* The host waits for the copy in of piece k before it operates on it.
* A copy out is enqueued on its stream after the host has operated.

Both streams first wait for the work on the caller's stream. The caller's stream waits for the last
copy out, so that the result can be used like that of any kernel. Cost: one piece in, one piece out,
and in between the slowest of the three stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.device.streams import Streams
from hpctrain.comm.transport.chunks import TensorParts

PIECE_BYTES = 8 * 2**20  # long enough for the bus's full speed, short enough that the first and last copy are cheap

# Operation on one piece: (host memory to write, host memory to read); both are the same tensor if
# in place.
HostOperation = Callable[[Tensor, Tensor], None]


class _Slot:
    """Pinned memory of one piece in progress, and the event after which it may be refilled."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._memory: dict[str, Tensor] = {}
        self.emptied: Any = None

    def memory(self, which: str, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return memory for the parts, packed."""
        nbytes = sum(part.numel() for part in parts) * dtype.itemsize
        held = self._memory.get(which)
        if held is None or held.numel() < nbytes:
            if self.emptied is not None:
                self._streams.synchronize(self.emptied)
            held = self._memory[which] = self._streams.pinned(max(nbytes, 64))
        return held[:nbytes].view(dtype)


class StagedCopier:
    """Executor of host operations on device tensors; only one run at a time."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._inward = streams.new()
        self._outward = streams.new()
        self._slots = (_Slot(streams), _Slot(streams))

    def run(self, pieces: Sequence[TensorParts], operation: HostOperation, dtype: torch.dtype) -> None:
        """Operate on all pieces in order; the caller's stream waits for the results, the host only for the inputs."""
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
            # Also the inward stream: after an error it may still read tensors that the caller is
            # about to free.
            for stream in (self._inward, self._outward):
                streams.wait(streams.current(), streams.record(stream))

    def _copy_in(self, index: int, piece: TensorParts, dtype: torch.dtype) -> tuple[Tensor, Tensor, Any]:
        slot = self._slots[index % 2]
        source = slot.memory("in", piece.inputs, dtype)
        target = source if piece.in_place else slot.memory("out", piece.outputs, dtype)
        if slot.emptied is not None:
            self._streams.wait(self._inward, slot.emptied)
        for part, place in zip(piece.inputs, _places(source, piece.inputs)):
            self._streams.copy(place, part, self._inward)
        return source, target, self._streams.record(self._inward)

    def _copy_out(self, index: int, piece: TensorParts, target: Tensor) -> None:
        for part, place in zip(piece.outputs, _places(target, piece.outputs)):
            self._streams.copy(part, place, self._outward)
        self._slots[index % 2].emptied = self._streams.record(self._outward)


def _places(memory: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.split(memory, [part.numel() for part in parts]) if parts else ()
