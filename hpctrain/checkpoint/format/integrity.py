"""Integrity of a checkpoint file: CRC-32 of every extent of the tensors, manifest of the objects, seal of the rest.

Intel's library (``isal``) computes the same CRC-32 as zlib several times faster. A login node that
only reads files needs neither the library nor the combination, which only writers of partial data
use.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import DIGEST, Array, Record, shape_text
from hpctrain.errors import CheckpointError

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

__all__ = ["combined", "crc32"]


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of consecutive byte ranges, from the CRC-32 and the length of each."""
    from isal.isal_zlib import crc32_combine

    whole = 0
    for crc, nbytes in parts:
        whole = crc32_combine(whole, crc, nbytes)
    return int(whole)


# Table of extents, which covers every byte of the tensors: offset, length and CRC-32 of each extent -------------------
#
# A tensor is divided into extents of 4 MiB from its start. With the CRC-32 of each, a reader can
# check a slice without reading all of the tensor. The CRC-32 of the tensor follows from them. Writers
# report what they wrote, in ranges of any size that do not cross the boundary between extents.


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


def table_of(tensors: Sequence[tuple[int, int]], written: Written) -> Table:
    """Return the table of ``tensors`` (offset and bytes of each), from the written ranges.

    Raises ``CheckpointError`` unless the ranges cover each byte of the tensors exactly once.
    """
    rows_written = written[np.argsort(written[:, 0], kind="stable")].tolist() if len(written) else []
    rows: list[tuple[int, int, int, int]] = []
    at = 0
    for number, (offset, nbytes) in enumerate(sorted(tensors)):
        for start in range(offset, offset + nbytes, layout.EXTENT):
            end, parts, reached = min(start + layout.EXTENT, offset + nbytes), [], start
            while at < len(rows_written) and reached < end and rows_written[at][0] == reached:
                parts.append((rows_written[at][2], rows_written[at][1]))
                reached += rows_written[at][1]
                at += 1
            if reached != end:
                raise CheckpointError(f"the bytes from {reached} to {end} of the file were not written, or not once")
            rows.append((number, start, end - start, combined(parts)))
    if at != len(rows_written):
        raise CheckpointError(f"bytes at {rows_written[at][0]} of the file were written that belong to no tensor")
    return np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))


def by_tensor(table: Table, count: int) -> list[list[Extent]]:
    """Return the extents of each of ``count`` tensors, in the order of their offsets."""
    found: list[list[Extent]] = [[] for _ in range(count)]
    for number, offset, nbytes, crc in table.tolist():
        if not 0 <= number < count:
            raise CheckpointError(f"{layout.EXTENTS} refers to a tensor {number}: there are {count}")
        found[number].append(Extent(offset, nbytes, crc))
    return found


def check_extents(extents: Sequence[Extent], offset: int, nbytes: int, what: str) -> None:
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


# Canonical list of every object and attribute of a file; its digest detects missing or altered ones -------------------
#
# HDF5 checksums its own structure, not its meaning: a file from which a dataset was removed, or in
# which a dataset was never written, opens without an error. The writer stores the manifest; the
# reader lists the file again and compares. One line per object or attribute, fields separated by
# tabs, lines sorted by their bytes:
#
#     group       PATH
#     dataset     PATH  TYPE  SHAPE
#     attribute   PATH  NAME  TYPE  SHAPE  CRC32


Attributes = Mapping[str, Array]


def manifest(groups: Mapping[str, Attributes], records: Iterable[Record]) -> str:
    """Return the manifest of a file's groups (path to attributes) and datasets, without the manifest's digest."""
    lines: list[str] = []
    for path, attributes in groups.items():
        lines.append(f"group\t{path}")
        lines += _attribute_lines(path, attributes)
    for record in records:
        lines.append(f"dataset\t{record.path}\t{record.storage.str}\t{shape_text(record.shape)}")
        lines += _attribute_lines(record.path, record.attributes)
    return "".join(line + "\n" for line in sorted(lines))


def digest(text: str) -> str:
    """Return the SHA-256 of a manifest in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def differences(promised: str, found: str) -> list[str]:
    """Return which objects are missing from a file, were added or are altered, one entry per object."""
    before, after = promised.splitlines(), found.splitlines()
    missing = _objects(set(before) - set(after))
    extra = _objects(set(after) - set(before))
    lines = [f"{item} is altered" for item in sorted(missing & extra)]
    lines += [f"{item} is missing" for item in sorted(missing - extra)]
    return lines + [f"{item} was added" for item in sorted(extra - missing)]


def _attribute_lines(path: str, attributes: Attributes) -> list[str]:
    return [
        f"attribute\t{path}\t{name}\t{array.dtype.str}\t{shape_text(array.shape)}\t{zlib.crc32(array.tobytes()):08x}"
        for name, array in attributes.items()
        if (path, name) != ("/", DIGEST)
    ]


def _objects(lines: set[str]) -> set[str]:
    """Return the objects of the lines; attributes of an object that is listed itself are left out."""
    fields = [line.split("\t") for line in lines]
    objects = {path for kind, path, *_ in fields if kind != "attribute"}
    named = {f"{kind} {path}" for kind, path, *_ in fields if kind != "attribute"}
    return named | {f"attribute {rest[0]} of {path}" for _, path, *rest in fields if path not in objects}


# Seal: digest of the bytes that have no other checksum: HDF5's structure, the table of extents, unused space ----------
#
# Note: the seal. Tensors have a CRC-32 and the manifest has a digest. HDF5 checksums most of its
# structure, but neither its unused space nor what a newer library might read there. The seal is the
# SHA-256 of all of that, so that a flip of any bit in the file is detected. The seal is a dataset
# itself: its offset is known before its content, and it does not cover itself. Ranges of zeros, which
# alignment makes long, only cost the time to read them.


LENGTH = 64  # hexadecimal digits
_PIECE = 1 << 20  # bytes per piece; part of the format
_MOST = 1 << 17  # pieces
_ZEROS = bytes(4096)
_AT = struct.Struct("<Q")

Range = tuple[int, int]  # offset and number of bytes


def seal(
    size: int,
    checked: Iterable[Range],
    read: Callable[[int, int], bytes],
    next_data: Callable[[int], int] = lambda at: at,
) -> str:
    """Return the seal of a file of ``size`` bytes, without the ranges ``checked``, which have other checksums.

    ``read`` returns the bytes at an offset; it may omit zeros at their end. Each range between
    those in ``checked`` is divided into pieces of 1 MiB from its start. A piece contributes its
    offset and its bytes up to the last one that is not zero. ``next_data`` returns an offset up to
    which the file has only zeros, so that holes cost nothing.

    Raises ``CheckpointError`` if there is more to read than the structure of any checkpoint has.
    """
    digest, read_so_far = hashlib.sha256(_AT.pack(size)), 0
    for start, count in outside(size, checked):
        at, end = start, start + count
        while (at := at + max(next_data(at) - at, 0) // _PIECE * _PIECE) < end:
            rest = _stripped(read(at, min(_PIECE, end - at)))
            if rest:
                digest.update(_AT.pack(at) + _AT.pack(len(rest)) + rest)
            at += _PIECE
            read_so_far += 1
            if read_so_far > _MOST:
                raise CheckpointError(f"more than {_MOST * _PIECE} bytes belong to no tensor: not what hpctrain writes")
    return digest.hexdigest()


def _stripped(data: bytes) -> bytes:
    """Return the bytes without the zeros at their end; page by page, because ``rstrip`` tests each byte."""
    end = len(data)
    while end >= len(_ZEROS) and data.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    return data[:end].rstrip(b"\0")


def overlap(ranges: Iterable[Range]) -> Range | None:
    """Return a range that overlaps with a preceding one; ``None`` if no ranges overlap."""
    end = 0
    for start, count in sorted(ranges):
        if start < end:
            return start, count
        end = start + count
    return None


def outside(size: int, checked: Iterable[Range]) -> Iterator[Range]:
    """Yield the ranges between those in ``checked``, in order. The ranges in ``checked`` must not overlap."""
    done = 0
    for start, count in sorted(checked):
        if start > done:
            yield done, start - done
        done = start + count
    if size > done:
        yield done, size - done
