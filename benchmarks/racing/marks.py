"""Accuracy that a member must reach, relative to ddp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WITHIN = 0.01  # one point


@dataclass(frozen=True)
class Point:
    """Progress of a member: samples over all workers, seconds of training, and evaluation results."""

    samples: int
    seconds: float
    accuracy: float
    loss: float


@dataclass(frozen=True)
class Mark:
    """Best accuracy of ddp, and its total number of samples."""

    accuracy: float
    samples: int


def mark_of(ddp: Sequence[Point]) -> Mark:
    """Return the mark that the others must reach."""
    return Mark(max(point.accuracy for point in ddp), ddp[-1].samples)


def reached(points: Sequence[Point], mark: Mark) -> Point | None:
    """Return the first point within one point of the mark; None if there is none."""
    return next((point for point in points if point.accuracy >= mark.accuracy - WITHIN), None)
