"""Say when a member has come as far as ddp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WITHIN = 0.01  # one point


@dataclass(frozen=True)
class Point:
    """Hold how far a member has come: samples over all workers, seconds of training, and what was found then."""

    samples: int
    seconds: float
    accuracy: float
    loss: float


@dataclass(frozen=True)
class Mark:
    """Hold the best accuracy of ddp, and all the samples that it had for it."""

    accuracy: float
    samples: int


def mark_of(ddp: Sequence[Point]) -> Mark:
    """Return what the others have to reach."""
    return Mark(max(point.accuracy for point in ddp), ddp[-1].samples)


def reached(points: Sequence[Point], mark: Mark) -> Point | None:
    """Return the first point within one point of the mark; None where there is none."""
    return next((point for point in points if point.accuracy >= mark.accuracy - WITHIN), None)
