"""Rows of the result table from timings, and ratios from rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from comm.bandwidth import algorithm_bandwidth, bus_bandwidth
from comm.names import ORDER


@dataclass(frozen=True)
class Row:
    """Row of the table: seconds per call on the slowest rank, and bandwidths in GB/s from the median."""

    candidate: str
    size: int  # bytes of the whole tensor in the requested dtype
    bytes: int  # bytes of this candidate's tensor, which may have another dtype
    min: float
    median: float
    p95: float
    algbw: float
    busbw: float
    repeats: int
    calls: int  # in each repeat


Figures = dict[tuple[int, str], Row]


def row_of(
    operation: str, name: str, nbytes: int, seconds: Sequence[float], *, ranks: int, size: int, calls: int
) -> Row:
    """Return the row of a candidate's repeats. The time of a ping-pong is half of its round trip."""
    times = [value / 2 for value in seconds] if operation == "pingpong" else list(seconds)
    median = statistics.median(times)
    return Row(
        name,
        size,
        nbytes,
        min(times),
        median,
        percentile(times, 95),
        algorithm_bandwidth(nbytes, median),
        bus_bandwidth(operation, nbytes, median, ranks),
        len(times),
        calls,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, with linear interpolation."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def by_size_and_name(rows: Iterable[Row]) -> Figures:
    """Return rows by (size, candidate)."""
    return {(row.size, row.candidate): row for row in rows}


def sizes_of(figures: Figures) -> list[int]:
    """Return the sizes, ascending."""
    return sorted({size for size, _ in figures})


def names_of(figures: Figures) -> list[str]:
    """Return the candidates: hpctrain's in order of appearance, then the others."""
    found = dict.fromkeys(name for _, name in figures)
    return [name for name in found if name not in ORDER] + [name for name in ORDER if name in found]


def ratio(figures: Figures, size: int, name: str, against: str) -> float | None:
    """Return how many times faster a candidate is than another, by medians; None if one of them is missing."""
    own, other = figures.get((size, name)), figures.get((size, against))
    return other.median / own.median if own and other else None


def to_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return rows as plain values."""
    return [asdict(row) for row in rows]
