"""Writing of bytes at offsets of a file, with read-back and comparison.

Everything here works on memory and a file descriptor, in any process: a rank or its writer process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.checkpoint.file import layout
from hpctrain.checkpoint.file.checksum import crc32
from hpctrain.checkpoint.file.extents import Written
from hpctrain.errors import CheckpointError


class Stretch(NamedTuple):
    """Bytes to write: their offset in the file, the data, and the name of their tensor."""

    offset: int
    data: memoryview
    name: str


class Row(NamedTuple):
    """A written range: offset in the file, length, CRC-32 and name of the tensor."""

    offset: int
    nbytes: int
    crc32: int
    name: str


_STEP = 1 << 20  # bytes handled at a time: the CRC finds in the cache what was just copied
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE: start writeback, do not wait


def pour(handle: int, stretches: Iterable[Stretch]) -> list[Row]:
    """Write byte ranges at their offsets, read them back, and return the written ranges.

    The disk works on one range while the next is copied and compared. Raises ``CheckpointError`` if
    the file differs from memory.
    """
    rows, buffer = [], _buffer()
    for offset, data, name in stretches:
        crc = 0
        for start in range(0, len(data), _STEP):
            piece = data[start : start + _STEP]
            crc = crc32(piece, crc)
            write_at(handle, piece, offset + start)
        rows.append(Row(offset, len(data), crc, name))
        _compare(handle, rows[-1], buffer)
        if len(data) >= _STEP:
            _start_writing(handle, offset, len(data))
    return rows


def sums(stretches: Iterable[Stretch]) -> list[Row]:
    """Return the result of ``pour`` without writing."""
    return [Row(offset, len(data), crc32(data), name) for offset, data, name in stretches]


def written(rows: Sequence[Row]) -> Written:
    """Return rows of offset, length and CRC-32 as an array."""
    return np.array([row[:3] for row in rows], dtype=np.int64).reshape(-1, 3)


def check(handle: int, rows: Iterable[Row]) -> None:
    """Read the written ranges back; raise ``CheckpointError`` if a CRC-32 differs."""
    buffer = _buffer()
    for row in rows:
        _compare(handle, row, buffer)


def _buffer() -> memoryview:
    return memoryview(bytearray(_STEP))


def _compare(handle: int, row: Row, buffer: memoryview) -> None:
    crc = 0
    for start in range(0, row.nbytes, _STEP):
        piece = buffer[: min(_STEP, row.nbytes - start)]
        _read_at(handle, piece, row.offset + start, row.name)
        crc = crc32(piece, crc)
    if crc != row.crc32:
        raise CheckpointError(
            f"{row.name} is wrong: its {row.nbytes} bytes at {row.offset} have the CRC-32 {crc:08x} in the file "
            f"and {row.crc32:08x} in memory"
        )


def write_at(handle: int, data: memoryview, offset: int) -> None:
    """Write all of the bytes at an offset of the file."""
    done = 0
    while done < len(data):
        written = os.pwrite(handle, data[done : done + layout.PIECE], offset + done)
        if written == 0:
            raise CheckpointError(f"the filesystem wrote none of {len(data) - done} bytes at offset {offset + done}")
        done += written


def _read_at(handle: int, piece: memoryview, offset: int, name: str) -> None:
    done = 0
    while done < len(piece):
        count = os.preadv(handle, [piece[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{name} is incomplete: the file ends {len(piece) - done} bytes too early")
        done += count


def _start_writing(handle: int, offset: int, nbytes: int) -> None:
    """Start writeback of a range while the next is prepared; systems without this call write at fsync."""
    if _sync_file_range is not None:
        _sync_file_range(handle, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _START_WRITING)


_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
