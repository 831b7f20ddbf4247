"""Pace of the machine: how much slower it is now than a quiet one; deadlines of tests are multiplied by it.

A deadline ends tests that hang. On a machine whose cores are busy with other work, a second may become five.
"""

from __future__ import annotations

import os
import time

QUIET = 2.0  # seconds from the start of a process to pytest's configuration, on a quiet machine of two slow cores
MOST = 6.0
_STARTED = "HPCTRAIN_TEST_STARTED"  # the seconds that the first process of the tests took to reach this point


def note_start() -> None:
    """Record how long this process took to start, for it and for the processes that it starts."""
    from hpctrain.train.run_folder import process_age

    os.environ.setdefault(_STARTED, f"{process_age():.2f}")


def factor() -> float:
    """Return the factor by which deadlines are extended now: at least 1."""
    started = float(os.environ.get(_STARTED, "0")) / QUIET
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(1.0, started, load), MOST)


def scaled(seconds: float) -> float:
    """Return a deadline for this machine."""
    return seconds * factor()


class Deadline:
    """Deadline in seconds from now; scaled again at each poll, as the load of the machine may change."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began, self._factor = seconds, time.monotonic(), 1.0

    @property
    def is_over(self) -> bool:
        """Return whether the deadline has passed."""
        self._factor = max(self._factor, factor())
        return time.monotonic() - self._began > self._seconds * self._factor
