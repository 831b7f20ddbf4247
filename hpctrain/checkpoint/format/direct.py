"""Direct writing: from memory to the disk, past the page cache of Linux.

A buffered write copies the bytes into the page cache, which takes a core as long as the copy and
the allocation of each page. Next to a rank that uses all cores, that is seconds. A direct write
takes almost no time of a core: the disk reads the bytes from the memory of the writer, and threads
wait for it.

The offset in the file and the address in memory must be multiples of ``BLOCK``; what is elsewhere in
memory is copied, one MiB at a time. Partial blocks are written through the page cache. Only files on
a disk of this node are written directly: on network filesystems, direct writes wait for the server
one by one.

Reading everything back would take as long as writing, because it comes from the disk. The last block
of each write, of at most one MiB, is read: a write that was lost or went elsewhere shows there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from hpctrain.checkpoint.format.layout import crc32
from hpctrain.errors import CheckpointError
from hpctrain.util import atomic

BLOCK = 4096  # bytes: multiples of it suit all disks and filesystems of Linux with pages of that size
LEAST = 1 << 20  # bytes: shorter writes are not worth waiting for the disk
_THREADS = 2
_COPIES = _THREADS + 1  # one is filled while the others are written
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE, and FALLOC_FL_KEEP_SIZE, without which it fails
_UNABLE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.EFAULT}
Pwrite = Callable[[int, memoryview, int], int]
_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate", None)


class DirectFile:
    """Second descriptor of an open file, for direct writes, and the threads that make them.

    The data must not change until ``check``; of data that others may change, which is not ``private``, a copy is
    written, which has the returned CRC-32.
    """

    def __init__(self, buffered: int, handle: int, private: bool, pwrite: Pwrite | None) -> None:
        self._buffered, self._handle, self._private, self._pwrite = buffered, handle, private, pwrite or os.pwrite
        self._able = True  # until the filesystem refuses a direct write
        self._memory = memoryview(mmap.mmap(-1, _COPIES * LEAST))  # aligned to a page
        self._pool = ThreadPoolExecutor(_THREADS, "direct write")
        self._calls: deque[Future[None]] = deque()
        self._written: list[tuple[int, int, str]] = []  # last blocks of writes: offset, CRC-32, name of the tensor
        self._next, self._used = 0, False

    def whole_blocks(self, data: memoryview, offset: int) -> tuple[int, int]:
        """Return which part of a range can be written directly; it is empty if none can."""
        begin, end = -offset % BLOCK, len(data) - (offset + len(data)) % BLOCK
        return (begin, end) if self._able and end - begin >= LEAST else (0, 0)

    def write(self, data: memoryview, offset: int, crc: int, name: str) -> int:
        """Begin to write whole blocks; return the CRC-32, continued from ``crc``.

        Raises ``CheckpointError`` with the ``name`` of the tensor if a copy of it differs; also for earlier calls.
        """
        self._used = True
        in_place = self._private and np.frombuffer(data, dtype=np.uint8).ctypes.data % BLOCK == 0
        for at in range(0, len(data), LEAST):
            block = data[at : at + LEAST]
            self._wait(_COPIES - 1)
            source = block if in_place else self._copy(block)
            before, crc = crc, crc32(block, crc)
            if not in_place and crc32(source, before) != crc:
                raise CheckpointError(f"{name} is wrong: a copy of it in memory differs")
            self._written.append((offset + at + len(block) - BLOCK, crc32(source[-BLOCK:]), name))
            self._start(self._write, source, offset + at)
        return crc

    def _start(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._calls.append(self._pool.submit(call, *arguments))
        except RuntimeError:  # no thread can be started: the interpreter ends, or there are too many
            self._pool.shutdown()  # a thread that was started may still make this call; from now on, none does
            call(*arguments)

    def check(self) -> None:
        """Wait for all writes, and read the last block of each from the disk.

        Raises the error of a write that failed, and ``CheckpointError`` if a block differs.
        """
        self._wait(0)
        blocks, self._written = self._written, []
        for number in range(_THREADS):
            self._start(self._compare, blocks[number::_THREADS])
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Wait until at most so many calls have not ended. Raises the error of one that failed."""
        while len(self._calls) > most:
            self._calls.popleft().result()

    def _copy(self, block: memoryview) -> memoryview:
        """Return a copy of a block at an aligned address; that of ``_COPIES`` calls before is overwritten."""
        begin, self._next = self._next * LEAST, (self._next + 1) % _COPIES
        copy = self._memory[begin : begin + len(block)]
        copy[:] = block
        return copy

    def _write(self, block: memoryview, offset: int) -> None:
        done = 0
        while done < len(block):
            try:
                count = self._pwrite(self._handle, block[done:], offset + done)
            except OSError as error:
                if error.errno not in _UNABLE:
                    raise
                self._able, count = False, self._pwrite(self._buffered, block[done:], offset + done)
            if count == 0:
                raise CheckpointError(f"the filesystem wrote none of {len(block) - done} bytes at {offset + done}")
            done += count

    def _compare(self, blocks: Iterable[tuple[int, int, str]]) -> None:
        with mmap.mmap(-1, BLOCK) as found:
            for offset, crc, name in blocks:
                if self._read(found, offset) < BLOCK or crc32(found) != crc:
                    raise CheckpointError(
                        f"{name} is wrong: the block at {offset} differs on the disk from that in memory"
                    )

    def _read(self, block: mmap.mmap, offset: int) -> int:
        try:
            return os.preadv(self._handle, [block], offset)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            return os.preadv(self._buffered, [block], offset)

    def sync(self) -> None:
        """Flush; only the descriptor that wrote reports failures."""
        if self._used:
            os.fsync(self._handle)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


def allocate(handle: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Reserve blocks of the disk for ranges of offset and length, if it can be done.

    Direct writes into an allocated range do not lock the file against each other. Raises ``OSError``
    if the disk has no space for all of them; then none is reserved.
    """
    if _fallocate is None or not atomic.on_disk(handle):
        return
    tried = []
    for offset, nbytes in ranges:
        tried.append((offset, nbytes))
        if _fallocate(handle, 0, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
            number = ctypes.get_errno()
            if number not in _FULL:
                return  # the writes report what is wrong
            release(handle, tried)
            raise OSError(number, os.strerror(number))


def release(handle: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Give the blocks of ranges of offset and length back to the disk, if it can be done: they are of no use."""
    if _fallocate is None:
        return
    for offset, nbytes in ranges:
        _fallocate(handle, _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(nbytes))


@contextmanager
def direct_file(handle: int, private: bool = False, pwrite: Pwrite | None = None) -> Iterator[DirectFile | None]:
    """Open a file again for direct writes; None if it is not on a disk of this node."""
    second = atomic.reopen_direct(handle) if mmap.PAGESIZE == BLOCK else -1
    if second < 0:
        yield None
        return
    try:
        file = DirectFile(handle, second, private, pwrite)
        try:
            yield file
        finally:
            file.close()
    finally:
        os.close(second)
