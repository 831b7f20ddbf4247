"""Files of samples on a parallel filesystem: the files of a set by patterns, and reads of many parts at once."""

from __future__ import annotations

import glob
import os
import re
import resource
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError
from hpctrain.stage.local import staged
from hpctrain.util.reading import fill, open_regular, reason
from hpctrain.util.text import counted, printable, short_repr, shorten

Numbers = npt.NDArray[np.int64]
Path = str | os.PathLike[str]

_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(\d+))?")
_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_FILES = 1_000_000

# Parts of a file that are close to each other are read by one call.
_SMALL = 64 * 1024  # bytes of the parts
_GAP = 4096  # bytes between them
_TOGETHER = 1 << 20  # bytes of a call
_AHEAD = 64  # calls that the system works on at once


# Names of files -------------------------------------------------------------------------------------------------------


def find_files(files: Path | Iterable[Path]) -> list[str]:
    """Return the files of paths, globs (``shards/*.tar``) and brace patterns (``{000..099}.tar``, ``{a,b}.tar``).

    The files of a glob are sorted; everything else is in the given order. Raises ``DataError`` with
    the names of missing files, and of files that occur twice.
    """
    patterns = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    found = [path for pattern in patterns for path in _files_of(os.fspath(pattern))]
    if not found:
        raise DataError("no files are named; allowed are paths, globs and brace patterns such as shard-{000..099}.tar")
    missing = [path for path in found if not os.path.exists(path)]
    if missing:
        names = ", ".join(shorten(printable(path), 80) for path in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise DataError(
            f"{len(missing)} of {counted(len(found), 'file')} missing: {names}{more}; correct the name or the pattern"
            + ("; URLs and pipes are not read: copy such files to a mounted filesystem" if _is_address(missing) else "")
        )
    if len(set(found)) < len(found):
        twice = Counter(found).most_common(1)[0][0]
        raise DataError(f"{printable(twice)} is named twice; name each file once")
    return found


def _is_address(paths: Iterable[str]) -> bool:
    return any("://" in path or path.startswith("pipe:") for path in paths)


def _files_of(pattern: str) -> list[str]:
    """Return the files of one pattern; a file of exactly this name is meant first."""
    if os.path.exists(pattern):
        return [pattern]
    found = []
    for path in _expanded(pattern):
        if not os.path.exists(path) and glob.has_magic(path):
            matches = sorted(glob.glob(path, recursive=True))
            if not matches:
                raise DataError(f"no file matches {printable(path)}; correct the pattern or the folder")
            found += matches
        else:
            found.append(path)
    return found


def _expanded(pattern: str) -> list[str]:
    """Return the paths of a brace pattern, the first brace varies slowest; braces that hold no choice stay."""
    if re.search(r"\{[^{}]*\{", pattern):
        raise DataError(f"{printable(pattern)} has braces within braces; allowed are lists and ranges side by side")
    paths, end = [""], 0
    for match in _BRACES.finditer(pattern):
        before, end = pattern[end : match.start()], match.end()
        choices = _choices(match[1], pattern)
        if len(paths) * len(choices) > _MOST_FILES:
            raise DataError(f"{printable(pattern)} names more than {_MOST_FILES:,} files; name fewer at once")
        paths = [path + before + choice for path in paths for choice in choices]
    return [path + pattern[end:] for path in paths]


def _choices(text: str, pattern: str) -> list[str]:
    """Return the choices of ``000..099``, ``0..9..3`` and ``a,b,c``; other text with its braces."""
    if match := _RANGE.fullmatch(text):
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if last < first or step < 1 or (last - first) // step >= _MOST_FILES:
            raise DataError(
                f"{printable(pattern)}: the range {{{text}}} is empty, descends or has more than {_MOST_FILES:,} "
                "numbers; allowed are ranges such as {000..099}"
            )
        padded = any(len(end) > 1 and end.startswith("0") for end in (match[1], match[2]))
        width = max(len(match[1]), len(match[2])) if padded else 0
        return [f"{number:0{width}d}" for number in range(first, last + 1, step)]
    return text.split(",") if "," in text else [f"{{{text}}}"]


# Reads ----------------------------------------------------------------------------------------------------------------


class Descriptor:
    """Open file, closed when the last reference to it is gone: a thread that reads keeps it open."""

    def __init__(self, path: str) -> None:
        """Open the file, or its staged copy on this node. Raises ``DataError`` if it cannot be opened."""
        self.path, copy = printable(path), staged(path)
        try:
            self.handle = open_regular(copy)
        except OSError as error:
            raise DataError(f"cannot open {self.path}: {reason(error).lower()}") from error
        status = os.fstat(self.handle)
        self.size, self.mtime_ns, self.is_copy = status.st_size, status.st_mtime_ns, copy != path

    def __del__(self) -> None:
        if (handle := getattr(self, "handle", -1)) >= 0:
            os.close(handle)

    def fetch(self, offset: int, size: int) -> None:
        """Start to read bytes of the file into the page cache, without waiting for them."""
        with suppress(OSError):  # some filesystems cannot
            os.posix_fadvise(self.handle, offset, size, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the file, fewer at its end. Raises ``DataError`` if it cannot be read."""
        try:
            data = os.pread(self.handle, size, offset)
            if len(data) == size:
                return data
            pieces, done = [data], len(data)
            while pieces[-1] and done < size:  # one call reads at most 2 GiB
                pieces.append(os.pread(self.handle, size - done, offset + done))
                done += len(pieces[-1])
            return b"".join(pieces)
        except OSError as error:
            raise DataError(f"cannot read {self.path} at offset {offset}: {reason(error).lower()}") from error

    def fill(self, out: npt.NDArray[Any], offset: int) -> None:
        """Fill an array from the bytes at an offset. Raises ``DataError`` if they cannot be read, or the file ends."""
        memory = memoryview(out.view(np.uint8).data).cast("B")
        try:
            missing = fill(self.handle, memory, offset)
        except OSError as error:
            raise DataError(f"cannot read {self.path} at offset {offset}: {reason(error).lower()}") from error
        if missing:
            raise DataError(f"{self.path} was truncated while it was read: it lacks {missing} bytes at its end")


class ShardFiles:
    """Files that are read at offsets, and never change: size and time of change are compared at every read.

    Descriptors are opened at first use in each process, and the least recently used ones are closed.
    They are not pickled. Processes that are forked may read with those of their parent, and several
    threads with the same object.
    """

    most_open = 1024  # and at most a quarter of the descriptors that a process may have

    def __init__(self, paths: Sequence[str], sizes: Sequence[int], mtimes_ns: Sequence[int]) -> None:
        """Record the files with their sizes and times; a time of 0 is unknown, and taken when the file is opened."""
        self.paths = list(paths)
        self._sizes, self._times = list(sizes), list(mtimes_ns)
        self._copies = set[int]()  # files of which this node has a staged copy, with its own time
        self._open: OrderedDict[int, Descriptor] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def size_of(self, number: int) -> int:
        """Return the bytes of a file."""
        return self._sizes[number]

    def read(self, files: Numbers, offsets: Numbers, sizes: Numbers) -> list[bytes]:
        """Return parts of files, in the order of the arguments; the reads are sorted by file and offset.

        Raises ``DataError`` if a file has changed, is truncated or cannot be read.
        """
        if not len(files):
            return []
        order = np.lexsort((offsets, files))
        files, offsets, sizes = files[order], offsets[order], sizes[order]
        found = [b""] * len(order)
        numbers, begins, lengths, places = (each.tolist() for each in (files, offsets, sizes, order))
        starts = _starts(files, offsets, sizes)
        calls = [
            (numbers[start], begins[start], begins[stop - 1] + lengths[stop - 1] - begins[start], start, stop)
            for start, stop in zip(starts, [*starts[1:], len(places)])
        ]
        for at in range(0, len(calls), _AHEAD):
            for block, start, stop in self._blocks(calls[at : at + _AHEAD]):
                if stop - start == 1:
                    found[places[start]] = block
                    continue
                first = begins[start]
                for place, begin, length in zip(places[start:stop], begins[start:stop], lengths[start:stop]):
                    found[place] = block[begin - first : begin - first + length]
        return found

    def _blocks(self, calls: Sequence[tuple[int, int, int, int, int]]) -> Iterator[tuple[bytes, int, int]]:
        """Yield the bytes of calls, and the parts in them. The system fetches those of all calls concurrently."""
        files = {number: self._opened(number) for number in dict.fromkeys(call[0] for call in calls)}
        if len(calls) > 1:
            for number, offset, size, _, _ in calls:
                files[number].fetch(offset, size)
        for number, offset, size, start, stop in calls:
            yield self._part(number, files[number], offset, size), start, stop
        for number, file in files.items():
            self._check(number, file)

    def _part(self, number: int, file: Descriptor, offset: int, size: int) -> bytes:
        data = file.read(offset, size)
        if len(data) < size:
            self._check(number, file)
            raise DataError(f"{file.path} is truncated: it has no {size} bytes at offset {offset}; copy it again")
        return data

    def _check(self, number: int, file: Descriptor) -> None:
        status = os.fstat(file.handle)
        if (status.st_size, status.st_mtime_ns) != (self._sizes[number], self._times[number]):
            raise self._changed(number)

    def _changed(self, number: int) -> DataError:
        return DataError(
            f"{printable(self.paths[number])} has changed since its index was made: its size or time of change "
            "differs; data files must not change while they are read; start again"
        )

    def _opened(self, number: int) -> Descriptor:
        file = self._open.pop(number, None) or self._newly_opened(number)
        self._open[number] = file
        return file

    def _newly_opened(self, number: int) -> Descriptor:
        file = Descriptor(self.paths[number])
        if file.is_copy and number not in self._copies or not self._times[number]:
            self._copies.add(number)
            self._times[number] = file.mtime_ns
        if (file.size, file.mtime_ns) != (self._sizes[number], self._times[number]):
            raise self._changed(number)
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = self.most_open if allowed < 0 else min(self.most_open, max(allowed // 4, 8))
        while len(self._open) >= most:
            with suppress(KeyError):  # another thread was faster
                self._open.popitem(last=False)
        return file


def _starts(files: Numbers, offsets: Numbers, sizes: Numbers) -> list[int]:
    """Return the first part of each call that reads: sorted parts, of which close small ones are read together."""
    gaps = offsets[1:] - (offsets + sizes)[:-1]
    apart = (files[1:] != files[:-1]) | (gaps > _GAP) | (gaps < 0)
    apart |= np.maximum(sizes[1:], sizes[:-1]) > _SMALL
    apart |= offsets[1:] // _TOGETHER != offsets[:-1] // _TOGETHER
    return [0, *(np.flatnonzero(apart) + 1).tolist()]


def sample_numbers(indices: Any, length: int, what: str) -> Numbers:
    """Return indices of samples as an array. Raises ``DataError`` if they are not whole numbers below ``length``."""
    # A list of seeded indices is not iterated: nothing here draws random numbers.
    numbers = np.asarray(indices)
    if not numbers.size:
        return np.empty(0, np.int64)
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise DataError(f"{short_repr(indices)} are no numbers of samples; allowed are whole numbers")
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest < 0 or highest >= length:
        wrong = lowest if lowest < 0 else highest
        raise DataError(f"no sample {wrong} in {what}: samples are numbered 0 to {length - 1}")
    return numbers.astype(np.int64, copy=False)
