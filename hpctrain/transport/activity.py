"""Note what this rank waits for, so that a watchdog in another thread can tell a wait from work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType

from hpctrain import trace
from hpctrain.errors import SettingsError


class Activity:
    """Say which blocking operation this rank is inside, since when, how many it has entered and how long they took.

    A class and no generator: it stands around every message, and a generator costs three times as much. Where a
    microsecond counts, ``begin`` and ``end`` are called instead.
    """

    __slots__ = ("operation", "since", "entered", "total", "_depth")

    def __init__(self) -> None:
        self.operation = ""
        self.since = 0.0
        self.entered = 0
        self.total = 0.0  # seconds in all operations that have ended
        self._depth = 0

    def begin(self, operation: str) -> None:
        """Name the operation that is waited for until ``end``; one inside another keeps the outer name."""
        if not self._depth:
            self.since = time.monotonic()
            self.entered += 1
            self.operation = operation
        self._depth += 1

    def end(self) -> None:
        """End what ``begin`` began."""
        self._depth -= 1
        if not self._depth:
            self._note(time.monotonic())

    def _note(self, now: float) -> None:
        """Add up an operation that has ended, and record it where somebody wants a trace."""
        self.total += now - self.since
        if trace.recording:
            trace.wait(self.operation, self.since, now)
        self.operation = ""

    def around(self, operation: str, call: Callable[[], object]) -> Callable[[], None]:
        """Return a call that is noted as this operation: ``with`` around it, at half of what that costs."""
        monotonic = time.monotonic

        def noted() -> None:
            if self._depth:
                call()
                return
            self._depth = 1
            self.entered += 1
            self.since = monotonic()
            self.operation = operation
            try:
                call()
            finally:
                self._depth = 0
                self._note(monotonic())

        return noted

    def __call__(self, operation: str) -> Activity:
        """Name the operation that the following ``with`` block waits for."""
        self.begin(operation)
        return self

    def __enter__(self) -> Activity:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    @property
    def seconds(self) -> float:
        """Return how long the present operation has lasted; 0 outside of one."""
        return time.monotonic() - self.since if self.operation else 0.0


waiting = Activity()


def timeout_seconds() -> float:
    """Return the deadline of one collective in seconds: ``HPCTRAIN_TIMEOUT``, ten minutes where it is not set."""
    text = os.environ.get("HPCTRAIN_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise SettingsError(f"HPCTRAIN_TIMEOUT={text!r} is not a number of seconds above 0")
    return seconds
