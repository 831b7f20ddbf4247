"""Retention policy for the checkpoints of a run: the last few, one per fixed number of steps, and the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import UsageError

Best = Literal["lowest", "highest"]


@dataclass(frozen=True)
class RetentionPolicy:
    """Retention policy; a checkpoint is kept if any of its three rules keeps it.

    ``last`` is the number of newest checkpoints to keep. ``every`` is a number of steps: a
    checkpoint whose step is a multiple of it is kept (0: off). ``best`` names a value that the run
    logs: the checkpoint in whose step the value was ``lowest`` or ``highest`` is kept, the earliest
    among equal ones (empty: off).
    """

    last: int = 2
    every: int = 0
    best: str = ""
    which: Best = "lowest"

    def __post_init__(self) -> None:
        if self.last < 1:
            raise UsageError(f"cannot keep the last {self.last} checkpoints: keep at least 1")
        if self.every < 0:
            raise UsageError(f"cannot keep a checkpoint every {self.every} steps: give a number from 0")
        if self.which not in ("lowest", "highest"):
            raise UsageError(f"cannot keep the checkpoint with the {self.which} value: allowed are lowest, highest")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint to keep or delete; ``value`` selects the best, ``None`` if it was not logged."""

    name: str
    step: int
    value: float | None = None


def superseded(candidates: Sequence[StoredCheckpoint], keep: RetentionPolicy) -> list[StoredCheckpoint]:
    """Return the candidates that no rule keeps, oldest first."""
    ordered = sorted(candidates, key=lambda one: one.step)
    staying = {one.name for one in ordered[-keep.last :]}
    staying |= {one.name for one in ordered if keep.every and one.step % keep.every == 0}
    best = best_of(ordered, keep.which) if keep.best else None
    return [one for one in ordered if one.name not in staying and one is not best]


def best_of(candidates: Sequence[StoredCheckpoint], which: Best = "lowest") -> StoredCheckpoint | None:
    """Return the earliest candidate with the best value; candidates without a finite value are ignored."""
    valued = [one for one in candidates if one.value is not None and math.isfinite(one.value)]
    sign = 1 if which == "lowest" else -1
    return min(valued, key=lambda one: (sign * (one.value or 0.0), one.step), default=None)
