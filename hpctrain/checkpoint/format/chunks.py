"""Byte ranges of a checkpoint file: written at their offsets, with a CRC-32 each, then read back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.direct import DirectFile
from hpctrain.checkpoint.format.layout import Written, crc32
from hpctrain.checkpoint.format.plan import FileChunk
from hpctrain.errors import CheckpointError
from hpctrain.util.reading import fill

_STEP = 1 << 20  # bytes handled at a time: the CRC finds in the cache what was just copied
_MOST_HELD = 16 << 20  # bytes of small ranges that wait for the direct writes
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE: start writeback, do not wait
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


class WrittenChunk(NamedTuple):
    """A written range: offset in the file, length, CRC-32 and name of the tensor."""

    offset: int
    nbytes: int
    crc32: int
    name: str


def write_chunks(handle: int, chunks: Iterable[FileChunk], direct: DirectFile | None = None) -> list[WrittenChunk]:
    """Write byte ranges at their offsets, read them back, and return the written ranges.

    The disk works on one range while the next is copied and compared. With ``direct``, whole blocks
    do not pass through the page cache, and one block per MiB is read back. Raises
    ``CheckpointError`` if the file differs from memory.
    """
    rows, buffered = [], _BufferedWrites(handle, hold=direct is not None)
    for offset, data, name in chunks:
        begin, end = direct.whole_blocks(data, offset) if direct is not None else (0, 0)
        crc = buffered.write(data[:begin], offset, 0, name)
        if direct is not None and begin < end:
            crc = direct.write(data[begin:end], offset + begin, crc, name)
        crc = buffered.write(data[end:], offset + end, crc, name)
        rows.append(WrittenChunk(offset, len(data), crc, name))
    if direct is not None:
        direct.check()
    buffered.flush()
    return rows


class _BufferedWrites:
    """Writes through the page cache; with ``hold``, small ones come last.

    Each locks the file: it would wait for all direct writes of all ranks, and they for it.
    """

    def __init__(self, handle: int, hold: bool) -> None:
        self._handle, self._hold = handle, hold
        self._buffer = memoryview(bytearray(_STEP))
        self._held: list[tuple[WrittenChunk, int, bytes]] = []
        self._nbytes = 0

    def write(self, data: memoryview, offset: int, crc: int, name: str) -> int:
        """Write bytes and read them back, now or later; return the CRC-32, continued from ``crc``."""
        if not len(data):
            return crc
        if self._hold and len(data) < _STEP:
            row = WrittenChunk(offset, len(data), crc32(data, crc), name)
            self._held.append((row, crc, bytes(data)))
            self._nbytes += len(data)
            if self._nbytes > _MOST_HELD:
                self.flush()
            return row.crc32
        start = crc
        for at in range(0, len(data), _STEP):
            block = data[at : at + _STEP]
            crc = crc32(block, crc)
            write_at(self._handle, block, offset + at)
        _compare(self._handle, WrittenChunk(offset, len(data), crc, name), self._buffer, start)
        if len(data) >= _STEP and _sync_file_range is not None:  # without it, fsync starts the write
            _sync_file_range(self._handle, ctypes.c_int64(offset), ctypes.c_int64(len(data)), _START_WRITING)
        return crc

    def flush(self) -> None:
        """Write what waits, and read it back."""
        for row, _, data in self._held:
            write_at(self._handle, memoryview(data), row.offset)
        for row, start, _ in self._held:
            _compare(self._handle, row, self._buffer, start)
        self._held, self._nbytes = [], 0


def checksums(chunks: Iterable[FileChunk]) -> list[WrittenChunk]:
    """Return the result of ``write_chunks`` without writing."""
    return [WrittenChunk(offset, len(data), crc32(data), name) for offset, data, name in chunks]


def as_written(rows: Sequence[WrittenChunk]) -> Written:
    """Return rows of offset, length and CRC-32 as an array."""
    return np.array([row[:3] for row in rows], dtype=np.int64).reshape(-1, 3)


def check_written(handle: int, rows: Iterable[WrittenChunk]) -> None:
    """Read the written ranges back; raise ``CheckpointError`` if a CRC-32 differs."""
    buffer = memoryview(bytearray(_STEP))
    for row in rows:
        _compare(handle, row, buffer)


def _compare(handle: int, row: WrittenChunk, buffer: memoryview, crc: int = 0) -> None:
    """Read a written range back; ``crc`` is that of the bytes of the tensor before it."""
    for at in range(0, row.nbytes, _STEP):
        block = buffer[: min(_STEP, row.nbytes - at)]
        if missing := fill(handle, block, row.offset + at):
            raise CheckpointError(f"{row.name} is incomplete: the file ends {missing} bytes too early")
        crc = crc32(block, crc)
    if crc != row.crc32:
        raise CheckpointError(
            f"{row.name} is wrong: its {row.nbytes} bytes at {row.offset} have the CRC-32 {crc:08x} in the file "
            f"and {row.crc32:08x} in memory"
        )


def write_at(handle: int, data: memoryview, offset: int) -> None:
    """Write all of the bytes at an offset of the file."""
    done = 0
    while done < len(data):
        count = os.pwrite(handle, data[done : done + layout.PIECE], offset + done)
        if count == 0:
            raise CheckpointError(f"the filesystem wrote none of {len(data) - done} bytes at offset {offset + done}")
        done += count
