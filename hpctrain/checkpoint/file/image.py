"""Sparse file in memory.

Note: HDF5 never touches the disk. On a full disk, or beyond a quota, HDF5 may report success, or
crash the process when it closes the file. So HDF5 writes the layout to such an image, which cannot
fail, and the bytes reach the disk by system calls whose errors hpctrain handles. The ranges of the
tensors are holes here and take no memory.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice

_BLOCK = 4096


class Image(io.RawIOBase):
    """File object in memory for reading and writing; bytes that were never written read as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, bytearray] = {}
        self._position = 0
        self.size = 0

    def parts(self, stretches: Iterable[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of the written blocks within ranges (offset and length); the rest are holes."""
        numbers = sorted(self._blocks)
        for offset, count in stretches:
            end = min(offset + count, self.size)
            for number in islice(numbers, bisect_left(numbers, offset // _BLOCK), None):
                start = number * _BLOCK
                if start >= end:
                    break
                low, high = max(start, offset), min(start + _BLOCK, end)
                yield low, bytes(self._blocks[number][low - start : high - start])

    def written(self, offset: int, count: int) -> int:
        """Return the number of bytes up to the end of the last written block; the rest of the range is a hole."""
        first, behind = offset // _BLOCK, -(-(offset + count) // _BLOCK)
        last = next((number for number in reversed(range(first, behind)) if number in self._blocks), None)
        return 0 if last is None else min(count, (last + 1) * _BLOCK - offset)

    def readable(self) -> bool:
        """Return true."""
        return True

    def writable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def truncate(self, size: int | None = None) -> int:
        """Set the size; bytes beyond it are discarded."""
        self.size = self._position if size is None else size
        for number in [number for number in self._blocks if number * _BLOCK >= self.size]:
            del self._blocks[number]
        if self.size // _BLOCK in self._blocks:
            block = self._blocks[self.size // _BLOCK]
            block[self.size % _BLOCK :] = bytes(_BLOCK - self.size % _BLOCK)
        return self.size

    def readinto(self, buffer: object) -> int:
        """Fill a buffer from the current position; return the number of bytes read."""
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(target), self.size - self._position))
        for number, inside, done, length in self._spans(count):
            block = self._blocks.get(number)
            target[done : done + length] = bytes(length) if block is None else block[inside : inside + length]
        self._position += count
        return count

    def write(self, data: object) -> int:
        """Write bytes at the current position; return their number."""
        source = memoryview(data).cast("B")  # type: ignore[arg-type]
        for number, inside, done, length in self._spans(len(source)):
            block = self._blocks.setdefault(number, bytearray(_BLOCK))
            block[inside : inside + length] = source[done : done + length]
        self._position += len(source)
        self.size = max(self.size, self._position)
        return len(source)

    def _spans(self, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield block, offset in the block, bytes done so far and bytes in the block, for a range from the position."""
        done = 0
        while done < count:
            number, inside = divmod(self._position + done, _BLOCK)
            length = min(count - done, _BLOCK - inside)
            yield number, inside, done, length
            done += length
