"""Record of the blocking operation of this rank, so that a watchdog thread can distinguish waiting from computing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType

from hpctrain import trace
from hpctrain.errors import SettingsError


class Activity:
    """Current blocking operation of this rank, its start, and the number and total time of all such operations.

    This is a class and not a generator-based context manager: it encloses every message, and a
    generator costs three times as much. Where a microsecond matters, ``begin`` and ``end`` are
    called directly.
    """

    __slots__ = ("operation", "since", "entered", "total", "_depth")

    def __init__(self) -> None:
        self.operation = ""
        self.since = 0.0
        self.entered = 0
        self.total = 0.0  # seconds in all completed operations
        self._depth = 0

    def begin(self, operation: str) -> None:
        """Set the blocking operation until ``end``; a nested operation keeps the outer name."""
        if not self._depth:
            self.since = time.monotonic()
            self.entered += 1
            self.operation = operation
        self._depth += 1

    def end(self) -> None:
        """End the operation of the matching ``begin``."""
        self._depth -= 1
        if not self._depth:
            self._note(time.monotonic())

    def _note(self, now: float) -> None:
        """Add the time of a completed operation, and record it if tracing is enabled."""
        self.total += now - self.since
        if trace.recording:
            trace.wait(self.operation, self.since, now)
        self.operation = ""

    def around(self, operation: str, call: Callable[[], object]) -> Callable[[], None]:
        """Return a call that is recorded as this operation: as ``with`` around it, at half the cost."""
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
        """Set the operation of the following ``with`` block."""
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
        """Return the duration of the current operation in seconds; 0 outside of any operation."""
        return time.monotonic() - self.since if self.operation else 0.0


waiting = Activity()


def timeout_seconds() -> float:
    """Return the timeout of a collective in seconds: ``HPCTRAIN_TIMEOUT``, ten minutes by default.

    Raises ``SettingsError`` if the variable is not a positive number.
    """
    text = os.environ.get("HPCTRAIN_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise SettingsError(f"HPCTRAIN_TIMEOUT={text!r} is not a number of seconds above 0")
    return seconds
