"""Hold a file in memory of which only a few parts are ever written.

Note: HDF5 never touches the disk. On a full disk or past a quota HDF5 may report success, or crash the whole process
when it closes the file. So it lays the file out in such an image, which cannot fail, and the bytes reach the disk by
system calls whose errors are ours to handle. The places of the tensors are holes here: they take no memory.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice

_BLOCK = 4096


class Image(io.RawIOBase):
    """Behave like a file opened for reading and writing; what was never written reads as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, bytearray] = {}
        self._position = 0
        self.size = 0

    def parts(self, stretches: Iterable[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of what was written within stretches (offset and length); the rest are holes."""
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
        """Return after how many of these bytes nothing was ever written."""
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
        """Move the position as a file does."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def truncate(self, size: int | None = None) -> int:
        """Set the size; what lies behind it is gone."""
        self.size = self._position if size is None else size
        for number in [number for number in self._blocks if number * _BLOCK >= self.size]:
            del self._blocks[number]
        if self.size // _BLOCK in self._blocks:
            block = self._blocks[self.size // _BLOCK]
            block[self.size % _BLOCK :] = bytes(_BLOCK - self.size % _BLOCK)
        return self.size

    def readinto(self, buffer: object) -> int:
        """Fill a buffer from the position on; return how many bytes there were."""
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(target), self.size - self._position))
        for number, inside, done, length in self._spans(count):
            block = self._blocks.get(number)
            target[done : done + length] = bytes(length) if block is None else block[inside : inside + length]
        self._position += count
        return count

    def write(self, data: object) -> int:
        """Put bytes at the position; return their number."""
        source = memoryview(data).cast("B")  # type: ignore[arg-type]
        for number, inside, done, length in self._spans(len(source)):
            block = self._blocks.setdefault(number, bytearray(_BLOCK))
            block[inside : inside + length] = source[done : done + length]
        self._position += len(source)
        self.size = max(self.size, self._position)
        return len(source)

    def _spans(self, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield block, offset in it, bytes done before and bytes to do there, for a stretch from the position on."""
        done = 0
        while done < count:
            number, inside = divmod(self._position + done, _BLOCK)
            length = min(count - done, _BLOCK - inside)
            yield number, inside, done, length
            done += length
