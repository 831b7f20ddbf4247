"""Wait by looking: at once where it takes microseconds, and without taking a core from those who are waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hpctrain.errors import DeadlineError
from hpctrain.transport.activity import timeout_seconds, waiting

SPINS = 200  # looks before the core is offered to another rank
CROWDED_SPINS = 2  # the same where ranks outnumber cores: who is waited for needs this very core
LOOKS = 4096  # between two looks at the clock, where a look costs next to nothing


class Patience:
    """Look for a while, then offer the core to other ranks between looks, and mind the deadline."""

    __slots__ = ("_spins", "_period", "_looks", "_deadline")

    def __init__(self, spins: int, period: int = LOOKS) -> None:
        self._spins = spins
        self._period = period
        self._looks = 0
        self._deadline = 0.0

    def ends(self) -> bool:
        """Come between two looks; tell whether the deadline has passed."""
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
    """Look until ``ready()``; at the deadline raise ``DeadlineError`` with what ``late()`` says.

    ``period`` are the looks between two at the clock: 1 where a look is a message to another node and back.
    """
    if ready():
        return
    with waiting(operation):
        patience = Patience(spins, period)
        while not ready():
            if patience.ends():
                raise DeadlineError(late())
