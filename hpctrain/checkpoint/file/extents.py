"""Keep the table that covers every byte of the tensors: where each extent lies, how long it is, and its CRC-32.

A tensor is cut into extents of 4 MiB from its start. The CRC-32 of each lets a reader check a slice without reading
all of the tensor; the tensor's own follows from them. Writers hand in what they wrote, in pieces of any size
that cross no border between extents.
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

Table = npt.NDArray[np.int64]  # rows of the columns; tensors are counted in the order of their places, from 0
Written = npt.NDArray[np.int64]  # rows of offset in the file, length, CRC-32


@dataclass(frozen=True)
class Extent:
    """Say where some bytes of a tensor lie in the file, and what their CRC-32 is."""

    offset: int
    nbytes: int
    crc32: int


def rows_of(nbytes: int) -> int:
    """Return the number of extents of a tensor."""
    return -(-nbytes // layout.EXTENT)


def table_of(places: Sequence[tuple[int, int]], written: Written) -> Table:
    """Return the table of tensors at ``places`` (offset and bytes), from what was written.

    Raises ``CheckpointError`` where what was written does not fill the places, each byte once.
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
    """Return the extents of each of so many tensors, in the order of their places."""
    found: list[list[Extent]] = [[] for _ in range(count)]
    for number, offset, nbytes, crc in table.tolist():
        if not 0 <= number < count:
            raise CheckpointError(f"{layout.EXTENTS} speaks of a tensor {number}: there are {count}")
        found[number].append(Extent(offset, nbytes, crc))
    return found


def check(extents: Sequence[Extent], offset: int, nbytes: int, what: str) -> None:
    """Raise ``CheckpointError`` unless the extents cover the bytes of a tensor, each once and in order."""
    reached = offset
    for extent in extents:
        if extent.offset != reached or extent.nbytes <= 0:
            break
        reached += extent.nbytes
    else:
        if reached == offset + nbytes:
            return
    raise CheckpointError(f"{layout.EXTENTS} does not cover {what}")
