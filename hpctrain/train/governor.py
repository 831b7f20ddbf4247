"""Know when a run must save to be done before its job is ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpctrain.cluster.deadline import Deadline

RESERVE = 60.0  # seconds for what nobody measures: leaving, a file system that is slow for once


class Governor:
    """Hold a deadline, and what the slowest step and the slowest save of a run have taken so far.

    ``margin`` is how many seconds before the deadline a run stops; 0: two of the slowest saves, the slowest step and a
    minute. ``clock`` gives seconds since the epoch. Asked on one rank alone, because clocks differ.
    """

    def __init__(
        self, deadline: Deadline | None, margin: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        self.deadline = deadline
        self._margin, self._clock = margin, clock
        self._slowest_step = self._slowest_save = 0.0

    def step(self, seconds: float) -> None:
        """Note what a step has taken."""
        self._slowest_step = max(self._slowest_step, seconds)

    def save(self, seconds: float) -> None:
        """Note what a checkpoint has taken."""
        self._slowest_save = max(self._slowest_save, seconds)

    @property
    def margin(self) -> float:
        """Return how many seconds before the deadline the run is to stop."""
        return self._margin or 2 * self._slowest_save + self._slowest_step + RESERVE

    @property
    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline.time - self._clock() if self.deadline is not None else float("inf")

    @property
    def is_due(self) -> bool:
        """Tell whether the run is to save and leave now."""
        return self.left <= self.margin
