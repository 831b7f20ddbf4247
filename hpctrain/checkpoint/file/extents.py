"""Table of extents, which covers every byte of the tensors: offset, length and CRC-32 of each extent.

A tensor is divided into extents of 4 MiB from its start. With the CRC-32 of each, a reader can
check a slice without reading all of the tensor. The CRC-32 of the tensor follows from them. Writers
report what they wrote, in ranges of any size that do not cross the boundary between extents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpctrain.checkpoint.file import layout
from hpctrain.checkpoint.file.checksum import combined
from hpctrain.errors import CheckpointError

COLUMNS = ("tensor", "offset", "length", "crc32")

Table = npt.NDArray[np.int64]  # rows of the columns; tensors are numbered from 0 in the order of their offsets
Written = npt.NDArray[np.int64]  # rows of offset in the file, length, CRC-32


@dataclass(frozen=True)
class Extent:
    """A byte range of a tensor: its offset in the file, its length and its CRC-32."""

    offset: int
    nbytes: int
    crc32: int


def rows_of(nbytes: int) -> int:
    """Return the number of extents of a tensor."""
    return -(-nbytes // layout.EXTENT)


def table_of(places: Sequence[tuple[int, int]], written: Written) -> Table:
    """Return the table of the tensors at ``places`` (offset and bytes), from the written ranges.

    Raises ``CheckpointError`` unless the ranges cover each byte of the tensors exactly once.
    """
    pieces = written[np.argsort(written[:, 0], kind="stable")].tolist() if len(written) else []
    rows: list[tuple[int, int, int, int]] = []
    at = 0
    for number, (offset, nbytes) in enumerate(sorted(places)):
        for start in range(offset, offset + nbytes, layout.EXTENT):
            end, parts, reached = min(start + layout.EXTENT, offset + nbytes), [], start
            while at < len(pieces) and reached < end and pieces[at][0] == reached:
                parts.append((pieces[at][2], pieces[at][1]))
                reached += pieces[at][1]
                at += 1
            if reached != end:
                raise CheckpointError(f"the bytes from {reached} to {end} of the file were not written, or not once")
            rows.append((number, start, end - start, combined(parts)))
    if at != len(pieces):
        raise CheckpointError(f"bytes at {pieces[at][0]} of the file were written that belong to no tensor")
    return np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))


def crc_of(extents: Sequence[Extent]) -> int:
    """Return the CRC-32 of a tensor from those of its extents."""
    return combined((extent.crc32, extent.nbytes) for extent in extents)


def by_tensor(table: Table, count: int) -> list[list[Extent]]:
    """Return the extents of each of ``count`` tensors, in the order of their offsets."""
    found: list[list[Extent]] = [[] for _ in range(count)]
    for number, offset, nbytes, crc in table.tolist():
        if not 0 <= number < count:
            raise CheckpointError(f"{layout.EXTENTS} refers to a tensor {number}: there are {count}")
        found[number].append(Extent(offset, nbytes, crc))
    return found


def check(extents: Sequence[Extent], offset: int, nbytes: int, what: str) -> None:
    """Raise ``CheckpointError`` unless the extents cover each byte of a tensor once and in order."""
    reached = offset
    for extent in extents:
        if extent.offset != reached or extent.nbytes <= 0:
            break
        reached += extent.nbytes
    else:
        if reached == offset + nbytes:
            return
    raise CheckpointError(f"{layout.EXTENTS} does not cover {what}")
