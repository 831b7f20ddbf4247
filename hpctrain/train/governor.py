"""Walltime guard: decides when a run must save to be finished before its job is ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpctrain.cluster.deadline import Deadline

RESERVE = 60.0  # seconds for costs that are not measured: shutdown, an unusually slow filesystem


class Governor:
    """Deadline of the job, and the slowest step and the slowest save of a run so far.

    ``margin`` is the number of seconds before the deadline at which the run stops. 0 means twice
    the slowest save, plus the slowest step, plus one minute. ``clock`` returns seconds since the
    epoch. Only one rank uses this object, because clocks differ.
    """

    def __init__(
        self, deadline: Deadline | None, margin: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        self.deadline = deadline
        self._margin, self._clock = margin, clock
        self._slowest_step = self._slowest_save = 0.0

    def step(self, seconds: float) -> None:
        """Record the duration of a step."""
        self._slowest_step = max(self._slowest_step, seconds)

    def save(self, seconds: float) -> None:
        """Record the duration of a checkpoint."""
        self._slowest_save = max(self._slowest_save, seconds)

    @property
    def margin(self) -> float:
        """Return the seconds before the deadline at which the run must stop."""
        return self._margin or 2 * self._slowest_save + self._slowest_step + RESERVE

    @property
    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline.time - self._clock() if self.deadline is not None else float("inf")

    @property
    def is_due(self) -> bool:
        """Return whether the run must save and exit now."""
        return self.left <= self.margin
