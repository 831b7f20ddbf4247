"""Spin waits: fast for waits of microseconds, and yielding the core to the ranks that are waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hpctrain.errors import DeadlineError
from hpctrain.transport.activity import timeout_seconds, waiting

SPINS = 200  # polls before the core is yielded to other ranks
CROWDED_SPINS = 2  # the same if ranks outnumber cores: the late rank may need this core
LOOKS = 4096  # polls between two readings of the clock, if a poll is cheap


class Patience:
    """Spin wait with a deadline: polls for a while, then yields the core between polls."""

    __slots__ = ("_spins", "_period", "_looks", "_deadline")

    def __init__(self, spins: int, period: int = LOOKS) -> None:
        self._spins = spins
        self._period = period
        self._looks = 0
        self._deadline = 0.0

    def ends(self) -> bool:
        """Account for one poll and yield if due; return whether the deadline has passed."""
        self._looks += 1
        if self._looks <= self._spins:
            return False
        os.sched_yield()
        if self._looks % self._period:
            return False
        self._deadline = self._deadline or time.monotonic() + timeout_seconds()
        return time.monotonic() > self._deadline


def until(
    ready: Callable[[], bool], operation: str, late: Callable[[], str], spins: int = SPINS, period: int = LOOKS
) -> None:
    """Poll until ``ready()``; at the deadline raise ``DeadlineError`` with the text of ``late()``.

    ``period`` is the number of polls per reading of the clock: 1 if a poll is a message to another
    node and back.
    """
    if ready():
        return
    with waiting(operation):
        patience = Patience(spins, period)
        while not ready():
            if patience.ends():
                raise DeadlineError(late())
