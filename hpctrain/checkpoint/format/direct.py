"""Direct writing: from memory to the disk, past the page cache of Linux.

A buffered write copies the bytes into the page cache, which takes a core as long as the copy and
the allocation of each page. Next to a rank that uses all cores, that is seconds. A direct write
takes almost no time of a core: the disk reads the bytes from the memory of the writer.

The offset in the file and the address in memory must agree modulo ``BLOCK``. Partial blocks are
written through the page cache. Only files on a disk of this node are written directly:
on network filesystems, direct writes wait for the server one by one.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hpctrain.util import atomic

BLOCK = 4096  # bytes: multiples of it suit all disks and filesystems of Linux with pages of that size
LEAST = 1 << 20  # bytes: shorter writes are not worth waiting for the disk
_UNABLE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate", None)


class DirectFile:
    """Second descriptor of an open file, for direct writes and reads."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._memory = mmap.mmap(-1, LEAST)  # aligned to a page
        self._buffer = memoryview(self._memory)

    def write(self, data: memoryview, offset: int) -> tuple[int, int]:
        """Write the whole blocks of a range; return which part of it was written: none if it cannot be."""
        begin, end = -offset % BLOCK, len(data) - (offset + len(data)) % BLOCK
        if end - begin < LEAST or (np.frombuffer(data, dtype=np.uint8).ctypes.data - offset) % BLOCK:
            return 0, 0
        return begin, begin + self._write(data[begin:end], offset + begin)

    def _write(self, data: memoryview, offset: int) -> int:
        """Write whole blocks; return how many bytes were written: fewer if the filesystem refuses direct writes."""
        if _fallocate is not None:  # written blocks of an allocated range need no further lock on the file
            _fallocate(self._handle, 0, ctypes.c_int64(offset), ctypes.c_int64(len(data)))
        done = 0
        while done < len(data):
            try:
                count = os.pwrite(self._handle, data[done:], offset + done)
            except OSError as error:
                if error.errno in _UNABLE:
                    return done
                raise
            done += count - count % BLOCK
            if count % BLOCK or not count:
                return done
        return done

    def blocks(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a range as they are on the disk; the last block is short if the file ends before."""
        done = 0
        while done < nbytes:
            count = os.preadv(self._handle, [self._buffer[: min(LEAST, nbytes - done)]], offset + done)
            if not count:
                return
            yield self._buffer[:count]
            done += count

    def sync(self) -> None:
        """Flush; only the descriptor that wrote reports failures."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._handle)
        self._buffer.release()
        self._memory.close()


@contextmanager
def direct_file(handle: int, wanted: bool) -> Iterator[DirectFile | None]:
    """Open a file again for direct writes; None if not ``wanted``, or if it is not on a disk of this node."""
    second = atomic.reopen_direct(handle) if wanted and mmap.PAGESIZE == BLOCK else -1
    file = DirectFile(second) if second >= 0 else None
    try:
        yield file
    finally:
        if file is not None:
            file.close()
