"""Parts of a metrics file: its last rows, rows at even distances, rows with a given name. Never all of a large file.

A run of a month writes hundreds of megabytes. A view needs the last rows, and as many points of a curve as
a terminal shows. Damaged lines are skipped, and so is an incomplete last line, which a running or killed
run leaves.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpctrain.train.metrics import row_of
from hpctrain.util.reading import open_regular

Row = dict[str, Any]
_BLOCK = 128 * 1024  # bytes of the end of a file, with some hundreds of rows
_SMALL = 1024 * 1024  # bytes of a file that is read as a whole
_LONGEST = 64 * 1024  # bytes of a row; longer ones are skipped
# Names of values that most programs log in a few rows only, as they begin.
RARE = ("val", "eval", "test", "dev", "accuracy", "best")


class MetricsFile:
    """A metrics file, open for reading; empty if there is none. Raises ``OSError`` if it cannot be read."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        status = None if handle < 0 else os.fstat(handle)
        self.size = 0 if status is None else status.st_size
        self.identity = None if status is None else (status.st_dev, status.st_ino)

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[MetricsFile]:
        """Open the file for a ``with`` block."""
        try:
            handle = open_regular(path)
        except FileNotFoundError:
            handle = -1
        try:
            yield cls(handle)
        finally:
            if handle >= 0:
                os.close(handle)

    def last(self, most: int) -> list[Row]:
        """Return the last rows, at most this many, in their order."""
        for length in (512 * most, _BLOCK):  # the first one is enough for rows of few values
            begin = max(self.size - length, 0)
            lines = self._read(begin, self.size - begin).split(b"\n")
            if len(lines) > most + 1 or not begin:
                break
        complete = lines[1:-1] if begin else lines[:-1]
        return _rows(complete[-most:])

    def after(self, offset: int) -> tuple[list[Row], int]:
        """Return the rows after an offset, which is the beginning of a line, and the offset of the next row."""
        content = self._read(offset, self.size - offset)
        end = content.rfind(b"\n") + 1
        return _rows(content[:end].split(b"\n")), offset + end

    @property
    def end(self) -> int:
        """Offset after the last complete line."""
        begin = max(self.size - _LONGEST, 0)
        return begin + self._read(begin, self.size - begin).rfind(b"\n") + 1

    def sampled(self, most: int) -> list[Row]:
        """Return about ``most`` rows at even distances of bytes, with the first and the last one."""
        if self.size <= max(most * 512, _SMALL):
            return thinned(_rows(self._read(0, self.size).split(b"\n")[:-1]), most)
        found = _rows(self._read(0, _LONGEST).split(b"\n")[:1])
        for number in range(1, most):
            found += _rows(self._line_after(number * self.size // most))
        return _ordered([*found, *self.last(1)])

    def rare(self, most: int, beginnings: Sequence[str] = RARE) -> list[Row]:
        """Return at most ``most`` rows that have a name with one of these beginnings, at even distances."""
        if not self.size:
            return []
        with suppress(ValueError, OSError), mmap.mmap(self._handle, self.size, access=mmap.ACCESS_READ) as content:
            offsets: set[int] = set()
            for beginning in beginnings:
                word, at = f'"{beginning}'.encode(), 0
                while (at := content.find(word, at)) >= 0:
                    offsets.add(content.rfind(b"\n", 0, at) + 1)
                    at = content.find(b"\n", at)
                    if at < 0:
                        break
            chosen = thinned(sorted(offsets), most)
            return _ordered(_rows([_line(content, offset) for offset in chosen]))
        return []  # the file has become shorter

    def _line_after(self, offset: int) -> list[bytes]:
        """Return the first whole line after an offset."""
        length = 2048
        while length <= _LONGEST:
            lines = self._read(offset, length).split(b"\n", 2)
            if len(lines) > 2:
                return lines[1:2]
            length *= 4
        return []

    def _read(self, offset: int, length: int) -> bytes:
        return os.pread(self._handle, length, offset) if self.size else b""


def _line(content: mmap.mmap, begin: int) -> bytes:
    end = content.find(b"\n", begin)
    return content[begin:end] if 0 <= end - begin <= _LONGEST else b""


def _rows(lines: Sequence[bytes]) -> list[Row]:
    found = (row_of(line.decode("utf-8", "replace")) for line in lines if len(line) <= _LONGEST)
    return [row for row in found if row is not None]


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """Return the rows by their steps, each step once."""
    by_step = {row["step"]: row for row in rows}
    return [by_step[step] for step in sorted(by_step)]


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` items at even distances, with the first and the last one."""
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]
