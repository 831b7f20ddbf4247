"""Writer of a checkpoint file: bytes at their offsets, with read-back and comparison, and an atomic commit.

Everything here works on memory and a file descriptor, in any process: a rank or its writer process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.attributes import Value
from hpctrain.checkpoint.format.draft import Draft
from hpctrain.checkpoint.format.integrity import Written, crc32
from hpctrain.checkpoint.format.plan import BoxPart, plan
from hpctrain.checkpoint.format.reader import verify_file
from hpctrain.checkpoint.format.source import Source, described
from hpctrain.errors import CheckpointError, CheckpointFaultError, HpctrainError
from hpctrain.util import atomic
from hpctrain.util.retry import NO_SPACE, PASSING, free_bytes, retries


class Stretch(NamedTuple):
    """Bytes to write: their offset in the file, the data, and the name of their tensor."""

    offset: int
    data: memoryview
    name: str


class WrittenRange(NamedTuple):
    """A written range: offset in the file, length, CRC-32 and name of the tensor."""

    offset: int
    nbytes: int
    crc32: int
    name: str


_STEP = 1 << 20  # bytes handled at a time: the CRC finds in the cache what was just copied
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE: start writeback, do not wait


def pour(handle: int, stretches: Iterable[Stretch]) -> list[WrittenRange]:
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
        rows.append(WrittenRange(offset, len(data), crc, name))
        _compare(handle, rows[-1], buffer)
        if len(data) >= _STEP:
            _start_writing(handle, offset, len(data))
    return rows


def sums(stretches: Iterable[Stretch]) -> list[WrittenRange]:
    """Return the result of ``pour`` without writing."""
    return [WrittenRange(offset, len(data), crc32(data), name) for offset, data, name in stretches]


def written(rows: Sequence[WrittenRange]) -> Written:
    """Return rows of offset, length and CRC-32 as an array."""
    return np.array([row[:3] for row in rows], dtype=np.int64).reshape(-1, 3)


def check_written(handle: int, rows: Iterable[WrittenRange]) -> None:
    """Read the written ranges back; raise ``CheckpointError`` if a CRC-32 differs."""
    buffer = _buffer()
    for row in rows:
        _compare(handle, row, buffer)


def _buffer() -> memoryview:
    return memoryview(bytearray(_STEP))


def _compare(handle: int, row: WrittenRange, buffer: memoryview) -> None:
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


# Atomic commit of a checkpoint file -----------------------------------------------------------------------------------
#
# Note: the commit. The file is written under a private name in the folder of its target. The written
# bytes are read back, compared, and flushed to the disk. Only then is the file renamed, and the
# folder flushed. After any error the private file is removed, and is never renamed to the target.


def commit(path: Path, write: Callable[[Path], None], needed: int) -> None:
    """Create a file by ``write`` under a private name, verify it and rename it to ``path``.

    ``needed`` is the number of bytes to write, for the error message of a full disk. Raises
    ``CheckpointError`` with the reason; a previous file at ``path`` then still exists.
    """
    temporary = atomic.private_name(path)
    try:
        prepare_commit(path)
        write(temporary)
        verify_file(temporary)
        atomic.put(temporary, path)
    except Exception as error:
        said = explained(error, path, temporary, needed)
        atomic.discard(temporary)
        raise said from error
    except BaseException:
        atomic.discard(temporary)
        raise
    flush_folder(path)


def prepare_commit(path: Path) -> None:
    """Create the folder of a checkpoint."""
    retries.call(lambda: path.parent.mkdir(parents=True, exist_ok=True))


def flush_folder(path: Path) -> None:
    """Make the rename durable. The new file is complete under its name by now, even if this raises."""
    try:
        retries.call(atomic.flush_folder, path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} was written and verified, but its folder could not be flushed ({error.strerror}): "
            "it may be gone after a power failure"
        ) from error


def explained(error: Exception, path: Path, temporary: Path, needed: int) -> Exception:
    """Return the ``CheckpointError`` with the reason why a file cannot be written; ``needed`` is its number of bytes.

    The bytes of the private file count as free, because it is about to be removed.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, HpctrainError) and number is None:
        if not isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"cannot write {path}: {error}")
    reason = os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__
    if number in NO_SPACE:
        free = _free_bytes(temporary)
        room = "an unknown number of" if free is None else str(free)
        reason += f": {needed} bytes are needed, {room} bytes are free in {path.parent}"
    kind = CheckpointFaultError if number in PASSING else CheckpointError
    return kind(f"cannot write {path}: {reason.lower() if number else reason}")


def _free_bytes(temporary: Path) -> int | None:
    """Return the bytes that were free before the private file was written."""
    free = free_bytes(temporary.parent)
    if free is None:
        return None
    try:
        taken = temporary.stat().st_blocks * 512
    except OSError:
        taken = 0
    return free + taken


# Writer of a checkpoint file from one process
#
# Note: layout first, bytes second. A ``Draft`` returns the offset of each dataset. Then structure and
# bytes are written with ``pwrite``, at the speed of the disk and without HDF5's global lock. The
# result is a plain HDF5 file. ``together.saving`` does the same from many processes.


def write_file(
    path: Path,
    sources: Iterable[Source],
    groups: Mapping[str, Mapping[str, Value]],
    alignment: int = layout.ALIGNMENT,
) -> None:
    """Write a new file of tensors and of groups with their attributes (``"/"`` is the root), flushed to the disk.

    The groups above a dataset are created implicitly. A file at ``path`` is not overwritten. The
    bytes of the tensors must not change during the call.
    """
    sources = list(sources)
    deal = plan([[described(source) for source in sources]], alignment)
    draft = Draft(deal.datasets, {source.path: source.attributes for source in sources}, groups, alignment)
    try:
        handle = atomic.create(path)
        try:
            places = dict(zip((dataset.name for dataset in deal.datasets), draft.places))
            rows = pour(handle, stretches(sources, deal.parts[0], places))
            put(handle, draft, written(rows))
            os.fsync(handle)  # by the descriptor that wrote: only that one reports failures
        finally:
            os.close(handle)
    finally:
        draft.close()


def stretches(
    sources: Sequence[Source], parts: Iterable[BoxPart], places: Mapping[str, int | None]
) -> Iterator[Stretch]:
    """Yield offset in the file and bytes of each part of the sources; ``places`` are the datasets' offsets."""
    for part in parts:
        source = sources[part.box]
        place, data = places[source.path], source.bytes(part.begin, part.end)
        if place is None:
            raise CheckpointError(f"HDF5 allocated no space for {source.path} in the file")
        for to, at, length in source.stretches(part.begin, part.end):
            yield Stretch(place + to, data[at : at + length], source.path)


def put(handle: int, draft: Draft, rows: Written) -> None:
    """Write the structure of a file whose tensors are written, and set the final size of the file."""
    parts = draft.finish(rows)
    os.ftruncate(handle, draft.size)
    pour(handle, (Stretch(offset, memoryview(part), "the structure of the file") for offset, part in parts))
