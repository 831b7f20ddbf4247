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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.device.streams import Streams

PIECE_BYTES = 8 * 2**20  # long enough for the bus's full speed, short enough that the first and last copy are cheap

# Operation on one piece: (host memory to write, host memory to read); both are the same tensor if
# in place.
HostOperation = Callable[[Tensor, Tensor], object]


class _Slot:
    """Pinned memory of one piece in progress, and the event after which it may be refilled."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._memory: dict[str, Tensor] = {}
        self.copied_out: Any = None

    def memory(self, which: str, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return memory for the parts, packed."""
        nbytes = sum(part.numel() for part in parts) * dtype.itemsize
        buffer = self._memory.get(which)
        if buffer is None or buffer.numel() < nbytes:
            if self.copied_out is not None:
                self._streams.synchronize(self.copied_out)
            buffer = self._memory[which] = self._streams.pinned(max(nbytes, 64))
        return buffer[:nbytes].view(dtype)


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
            next_copy = self._copy_in(0, pieces[0], dtype)
            for index, piece in enumerate(pieces):
                (source, target, arrived), next_index = next_copy, index + 1
                if next_index < len(pieces):
                    next_copy = self._copy_in(next_index, pieces[next_index], dtype)
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
        if slot.copied_out is not None:
            self._streams.wait(self._inward, slot.copied_out)
        for part, packed in zip(piece.inputs, _split(source, piece.inputs)):
            self._streams.copy(packed, part, self._inward)
        return source, target, self._streams.record(self._inward)

    def _copy_out(self, index: int, piece: TensorParts, target: Tensor) -> None:
        for part, packed in zip(piece.outputs, _split(target, piece.outputs)):
            self._streams.copy(part, packed, self._outward)
        self._slots[index % 2].copied_out = self._streams.record(self._outward)


def _split(memory: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.split(memory, [part.numel() for part in parts]) if parts else ()


# Partition of collectives on long tensors into collectives on pieces; pure, so that all ranks cut alike ---------------


@dataclass(frozen=True)
class TensorParts:
    """Parts of tensors that one host operation reads and writes, each packed in the given order.

    ``in_place`` means that the operation works in the memory that it reads.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    in_place: bool = False


def _ranges(numel: int, step: int) -> Iterator[slice]:
    # An empty tensor gives one empty piece, because the other ranks wait for this rank in any case.
    for start in range(0, max(numel, 1), max(step, 1)):
        yield slice(start, min(start + step, numel))


def elementwise(tensor: Tensor, nbytes: int, *, read: bool = True, write: bool = True) -> list[TensorParts]:
    """Cut a flat tensor that is changed in place (all_reduce, broadcast), only read (send) or only written (recv).

    A piece has at most ``nbytes`` bytes.
    """
    step = nbytes // tensor.element_size()
    cuts = [tensor[piece] for piece in _ranges(tensor.numel(), step)]
    return [TensorParts([cut] if read else [], [cut] if write else [], in_place=read and write) for cut in cuts]


def in_shares(out: Tensor, tensor: Tensor, size: int, nbytes: int) -> list[TensorParts]:
    """Cut an all_gather or reduce_scatter of flat tensors: a piece is the same part of every share.

    The shorter of the two tensors is one of ``size`` shares, the other one has all of them.
    """
    share, step = min(out.numel(), tensor.numel()), nbytes // (tensor.element_size() * size)
    inputs, outputs = (whole.view(-1, share).unbind() if share else [whole] for whole in (tensor, out))
    return [
        TensorParts([part[piece] for part in inputs], [part[piece] for part in outputs])
        for piece in _ranges(share, step)
    ]
