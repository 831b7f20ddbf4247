"""Seal: digest of the bytes that have no other checksum: HDF5's structure, the table of extents, unused space.

Note: the seal. Tensors have a CRC-32 and the manifest has a digest. HDF5 checksums most of its
structure, but neither its unused space nor what a newer library might read there. The seal is the
SHA-256 of all of that, so that a flip of any bit in the file is detected. The seal is a dataset
itself: its offset is known before its content, and it does not cover itself. Ranges of zeros, which
alignment makes long, only cost the time to read them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator

from hpctrain.errors import CheckpointError

LENGTH = 64  # hexadecimal digits
_PIECE = 1 << 20  # bytes per piece; part of the format
_MOST = 1 << 17  # pieces
_ZEROS = bytes(4096)
_AT = struct.Struct("<Q")

Stretch = tuple[int, int]  # offset and number of bytes


def seal(
    size: int,
    apart: Iterable[Stretch],
    read: Callable[[int, int], bytes],
    next_data: Callable[[int], int] = lambda at: at,
) -> str:
    """Return the seal of a file of ``size`` bytes, without the ranges ``apart``, which have other checksums.

    ``read`` returns the bytes at an offset; it may omit zeros at their end. Each range between
    those in ``apart`` is divided into pieces of 1 MiB from its start. A piece contributes its
    offset and its bytes up to the last one that is not zero. ``next_data`` returns an offset up to
    which the file has only zeros, so that holes cost nothing.

    Raises ``CheckpointError`` if there is more to read than the structure of any checkpoint has.
    """
    digest, read_so_far = hashlib.sha256(_AT.pack(size)), 0
    for start, count in outside(size, apart):
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


def overlap(stretches: Iterable[Stretch]) -> Stretch | None:
    """Return a range that overlaps with a preceding one; ``None`` if no ranges overlap."""
    end = 0
    for start, count in sorted(stretches):
        if start < end:
            return start, count
        end = start + count
    return None


def outside(size: int, apart: Iterable[Stretch]) -> Iterator[Stretch]:
    """Yield the ranges between those in ``apart``, in order. The ranges in ``apart`` must not overlap."""
    done = 0
    for start, count in sorted(apart):
        if start > done:
            yield done, start - done
        done = start + count
    if size > done:
        yield done, size - done
