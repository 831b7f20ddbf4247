"""Seal the bytes of a file that nothing else protects: HDF5's structure, the table of extents, what lies unused.

Note: the seal. Tensors have a CRC-32 and the manifest has a digest; HDF5 checksums most of its structure, but neither
what it leaves unused nor what a newer library might read there. The seal is the SHA-256 of all of that, so that no
bit of a file may flip unseen. It is a dataset itself: its place is known before its content, and it is not part
of what it seals. Stretches of zeros, which alignment makes long, cost nothing but their reading.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator

from hpctrain.errors import CheckpointError

LENGTH = 64  # hexadecimal digits
_PIECE = 1 << 20  # bytes looked at together; part of the format
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
    """Return the seal of a file of ``size`` bytes, but for the stretches that are protected ``apart``.

    ``read`` returns the bytes at an offset; it may leave out zeros at their end. Each stretch between those is cut into
    pieces of 1 MiB from its start; a piece counts with its offset and its bytes up to the last one that is not zero.
    ``next_data`` returns an offset from one on, up to which the file has only zeros: holes cost nothing.

    Raises ``CheckpointError`` if there is more to read than the structure of any checkpoint.
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
    """Return the bytes without zeros at their end; a page at a time, since ``rstrip`` looks at each."""
    end = len(data)
    while end >= len(_ZEROS) and data.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    return data[:end].rstrip(b"\0")


def overlap(stretches: Iterable[Stretch]) -> Stretch | None:
    """Return a stretch that begins before another one ends, ``None`` where each has bytes of its own."""
    end = 0
    for start, count in sorted(stretches):
        if start < end:
            return start, count
        end = start + count
    return None


def outside(size: int, apart: Iterable[Stretch]) -> Iterator[Stretch]:
    """Yield the stretches between those that are apart, which must not overlap, in order."""
    done = 0
    for start, count in sorted(apart):
        if start > done:
            yield done, start - done
        done = start + count
    if size > done:
        yield done, size - done
