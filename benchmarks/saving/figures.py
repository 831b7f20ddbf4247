"""Rows of the result table from timings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """Row of the table: seconds on the slowest rank, 10^9 bytes per second from the median."""

    kind: str  # write or read
    candidate: str
    size: int  # bytes
    min: float
    median: float
    max: float
    rate: float
    growth: int | None  # bytes: largest growth of a rank's memory in any turn
    repeats: int


Figures = dict[str, Row]


def row_of(kind: str, name: str, nbytes: int, seconds: Sequence[float], growth: int | None) -> Row:
    """Return the row of a candidate's turns."""
    median = statistics.median(seconds)
    return Row(
        kind, name, nbytes, min(seconds), median, max(seconds), nbytes / median / 1e9, growth, len(seconds)
    )


def by_name(rows: Iterable[Row]) -> Figures:
    """Return rows by candidate."""
    return {row.candidate: row for row in rows}


def ratio(figures: Figures, name: str, against: str) -> float | None:
    """Return how many times faster a candidate is than another, by medians; None if one of them is missing."""
    own, other = figures.get(name), figures.get(against)
    return other.median / own.median if own and other else None


def to_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return rows as plain values."""
    return [asdict(row) for row in rows]
