"""Say where parameters lie in flat memory, and what of them each rank holds: pure arithmetic.

Note: flat slices. The parameters of a piece lie behind each other, and rank r of p holds the r-th of p equal slices,
wherever that cuts them. So every rank holds the same number of elements, gathering and reducing need no copy to bring
tensors in order, and a parameter stays contiguous for those who compute with it (after Zhao et al., "PyTorch FSDP:
Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64  # bytes: parameters and slices start on cache lines


@dataclass(frozen=True)
class Held:
    """Say which elements of a parameter a rank holds, in C order, and where they lie in its slice."""

    begin: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        """Return how many they are."""
        return self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """Place parameters of ``numels`` elements at ``places`` of a flat tensor that ``ranks`` slices make up."""

    places: tuple[int, ...]
    numels: tuple[int, ...]
    ranks: int
    share: int  # elements of a slice

    @property
    def numel(self) -> int:
        """Return the elements of the flat tensor, padding included."""
        return self.ranks * self.share

    def held(self, rank: int) -> list[Held]:
        """Return what a rank holds of each parameter; maybe nothing."""
        low, high = rank * self.share, (rank + 1) * self.share
        found = []
        for place, numel in zip(self.places, self.numels):
            begin, end = max(place, low), min(place + numel, high)
            found.append(Held(begin - place, end - place, begin - low) if begin < end else Held(0, 0, 0))
        return found


def lay_out(numels: Sequence[int], ranks: int, itemsize: int) -> Layout:
    """Lay parameters out behind each other, each on a cache line; ``itemsize`` in bytes."""
    align = max(ALIGN // itemsize, 1)
    places, end = [], 0
    for numel in numels:
        places.append(end)
        end += -(-numel // align) * align
    share = max(-(-end // (ranks * align)), 1) * align
    return Layout(tuple(places), tuple(numels), ranks, share)


@dataclass(frozen=True)
class Seat:
    """Give one tensor its place in memory that many use in turn: ``after`` have to be done with it first."""

    offset: int
    after: int  # so many of the tensors before


def ring(sizes: Sequence[int], capacity: int) -> list[Seat]:
    """Seat tensors, which come and go in order, in a ring of ``capacity`` elements that holds the largest of them."""
    seats: list[Seat] = []
    end, lap = 0, 0  # where the last one ends, and the first of those since the ring was last begun anew
    for number, size in enumerate(sizes):
        if end + size > capacity:
            end, lap = 0, number
        after = next(
            (
                other + 1
                for other in reversed(range(lap))
                if _overlap(seats[other].offset, sizes[other], end, size)
            ),
            0,
        )
        seats.append(Seat(end, max(after, seats[-1].after if seats else 0)))
        end += size
    return seats


def _overlap(start: int, size: int, other: int, length: int) -> bool:
    return start < other + length and other < start + size
