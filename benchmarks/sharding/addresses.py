"""Memory of this process as reported by Linux, with the parts that it shares with other ranks."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import UsageError

Extent = tuple[str, int, int]  # device and inode of a shared object, with begin and end in it

_ROLLUP, _MAPS = Path("/proc/self/smaps_rollup"), Path("/proc/self/maps")


@dataclass(frozen=True)
class Resident:
    """Resident bytes of this process: private memory, and its part of shared memory.

    A page that several processes have mapped counts in equal parts for them (proc(5): Pss), so that
    ranks add up. Mapped files, such as programs and libraries, are excluded: their part depends on
    other processes of the machine.
    """

    private: int
    shared: int

    @property
    def total(self) -> int:
        """Return the sum of both."""
        return self.private + self.shared


def resident(text: str | None = None) -> Resident:
    """Return the resident memory of this process now."""
    try:
        lines = (_ROLLUP.read_text() if text is None else text).splitlines()
    except OSError:
        lines = []
    fields = dict(line.split(":", 1) for line in lines[1:])
    if not {"Pss_Anon", "Pss_Shmem"} <= fields.keys():
        raise UsageError(f"memory cannot be measured here: {_ROLLUP} with Pss_Anon is needed (linux 5.9)")
    return Resident(*(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem")))


@dataclass(frozen=True)
class Region:
    """Part of a shared object that is mapped into this process."""

    begin: int
    end: int
    key: str
    offset: int


class SharedMap:
    """Mapping from addresses to shared memory objects."""

    def __init__(self, text: str | None = None) -> None:
        regions = map(_region, (_MAPS.read_text() if text is None else text).splitlines())
        self._regions = sorted((one for one in regions if one is not None), key=lambda one: one.begin)
        self._begins = [one.begin for one in self._regions]

    def find(self, address: int, nbytes: int) -> Extent | None:
        """Return the extent of a shared object at an address; None for private memory."""
        place = bisect_right(self._begins, address) - 1
        if place < 0 or address >= self._regions[place].end:
            return None
        one = self._regions[place]
        start = address - one.begin + one.offset
        return one.key, start, start + nbytes


def _region(line: str) -> Region | None:
    """Return the region of a line of proc(5)'s maps if it is shared."""
    addresses, permissions, offset, device, inode = line.split()[:5]
    if permissions[3] != "s":
        return None
    begin, end = (int(word, 16) for word in addresses.split("-"))
    return Region(begin, end, f"{device} {inode}", int(offset, 16))


def union(extents: Iterable[Extent]) -> list[Extent]:
    """Return the union of extents, each byte once."""
    found: list[Extent] = []
    for key, begin, end in sorted(extents):
        if found and found[-1][0] == key and begin <= found[-1][2]:
            found[-1] = key, found[-1][1], max(end, found[-1][2])
        else:
            found.append((key, begin, end))
    return found


def size(extents: Sequence[Extent]) -> int:
    """Return the bytes of extents that do not overlap."""
    return sum(end - begin for _, begin, end in extents)


def give_back() -> None:
    """Let the C library return freed memory to the system if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
