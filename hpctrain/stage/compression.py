"""Compression of archives: a file of gzip members, which several threads compress and decompress.

Each member is one block of the content and has its own size in its header, so that a reader finds the next member
without decompressing. ``tar`` and ``gzip`` read such a file as any other.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hpctrain.stage.local import Piece

try:  # each node decompresses: isal is several times faster at that than zlib
    from isal import isal_zlib

    codec: Any = isal_zlib
except ImportError:
    codec = zlib
# An archive is packed once, by zlib: a compressor of isal gives other bytes for the same block once in some hundred
# times. Higher levels save a tenth of the bytes, and take two to three times as long.
_LEVEL = 1
BLOCK = 1024 * 1024  # most bytes of the content in one member
_MOST_THREADS = 8
# RFC 1952: magic number, deflate, an extra field; no time; fastest method, unknown system; the field: 8 bytes, its
# name, 4 bytes of content, which are the size of the member.
_HEADER = struct.Struct("<4sIBBH2sHI")
_START, _NAME = b"\x1f\x8b\x08\x04", b"HT"
_TRAILER = struct.Struct("<II")  # checksum and size of the block


def default_threads() -> int:
    """Return the number of threads for compression: one per core of this process, at most 8."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


class BlockCompressor:
    """File object that compresses each written block, in order, and passes the members to ``write``."""

    def __init__(self, write: Callable[[bytes], object], threads: int | None = None) -> None:
        self._write = write
        self._threads = threads or default_threads()
        self._pool = ThreadPoolExecutor(self._threads, "compress")
        self._waiting: deque[Future[bytes]] = deque()

    def write(self, content: bytes) -> int:
        """Compress the next bytes; ``write`` may get them later."""
        for begin in range(0, len(content), BLOCK):
            self._waiting.append(self._pool.submit(_member, content[begin : begin + BLOCK]))
        while len(self._waiting) > 2 * self._threads:
            self._write(self._waiting.popleft().result())
        return len(content)

    def finish(self) -> None:
        """Pass on what is left."""
        while self._waiting:
            self._write(self._waiting.popleft().result())
        self.close()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


def decompressed(pieces: Iterable[Piece], threads: int | None = None) -> Generator[bytes, None, None]:
    """Yield the content of a file that arrives in pieces. Raises ``ValueError`` if it is damaged."""
    threads = threads or default_threads()
    pool = ThreadPoolExecutor(threads, "decompress")
    waiting: deque[Future[bytes]] = deque()
    try:
        for member in _members(pieces):
            waiting.append(pool.submit(_block, member))
            while waiting and (len(waiting) > 2 * threads or waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _member(block: bytes) -> bytes:
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    content: bytes = compressor.compress(block) + compressor.flush()
    size = _HEADER.size + len(content) + _TRAILER.size
    header = _HEADER.pack(_START, 0, 4, 255, 8, _NAME, 4, size)
    return header + content + _TRAILER.pack(codec.crc32(block), len(block))


def _members(pieces: Iterable[Piece]) -> Iterator[memoryview]:
    """Yield the members of a file."""
    rest: Piece = b""
    for piece in pieces:
        view = memoryview(b"".join((rest, piece)) if rest else piece)
        while len(view) >= _HEADER.size and len(view) >= (size := _size_of(view)):
            yield view[:size]
            view = view[size:]
        rest = bytes(view)
    if rest:
        raise ValueError("it ends within a block")


def _size_of(view: memoryview) -> int:
    start, time, _, _, extra, name, length, size = _HEADER.unpack_from(view)
    least = _HEADER.size + _TRAILER.size
    if (start, time, extra, name, length) != (_START, 0, 8, _NAME, 4) or not least < size <= 2 * BLOCK:
        raise ValueError("it has no block where one begins")
    return int(size)


def _block(member: memoryview) -> bytes:
    stream = codec.decompressobj(codec.MAX_WBITS + 16)  # of gzip, with its checksum
    try:
        content: bytes = stream.decompress(member, BLOCK + 1)
    except (zlib.error, codec.error) as error:
        raise ValueError(f"a block is damaged: {error}") from error
    if not stream.eof or stream.unused_data or len(content) > BLOCK:
        raise ValueError("a block has another size than its header says")
    return content
