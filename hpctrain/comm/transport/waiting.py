"""Waiting: record of this rank's blocking operation, for the watchdog thread, and spin waits that yield the core."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from hpctrain import trace
from hpctrain.errors import DeadlineError, SettingsError

if TYPE_CHECKING:
    from hpctrain.comm.transport.base import Recordable


class Activity:
    """Current blocking operation of this rank, its start, and the number and total time of all such operations.

    This is a class and not a generator-based context manager: it encloses every message, and a
    generator costs three times as much. Where a microsecond matters, ``begin`` and ``end`` are
    called directly.
    """

    __slots__ = ("operation", "since", "count", "total", "_depth", "_clock")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.operation = ""
        self.since = 0.0
        self.count = 0
        self.total = 0.0  # seconds in all completed operations
        self._depth = 0

    def begin(self, operation: str) -> None:
        """Set the blocking operation until ``end``; a nested operation keeps the outer name."""
        if not self._depth:
            self.since = self._clock()
            self.count += 1
            self.operation = operation
        self._depth += 1

    def end(self) -> None:
        """End the operation of the matching ``begin``."""
        self._depth -= 1
        if not self._depth:
            self._record(self._clock())

    def _record(self, now: float) -> None:
        """Add the time of a completed operation, and record it if tracing is enabled."""
        self.total += now - self.since
        if trace.recording:
            trace.wait(self.operation, self.since, now)
        self.operation = ""

    def around(
        self, operation: str, call: Callable[[], object], counted: Recordable | None = None, nbytes: int = 0
    ) -> Callable[[], None]:
        """Return a call that is recorded as this operation: as ``with`` around it, at half the cost.

        If ``counted`` has a recorder, each call counts as one operation of ``nbytes``.
        """
        clock = self._clock

        def recorded() -> None:
            if counted is not None and counted.recorder is not None:
                counted.recorder.count(operation, nbytes)
            if self._depth:
                call()
                return
            self._depth = 1
            self.count += 1
            self.since = clock()
            self.operation = operation
            try:
                call()
            finally:
                # As in ``_record``, without the cost of a call.
                self._depth = 0
                now = clock()
                self.total += now - self.since
                if trace.recording:
                    trace.wait(operation, self.since, now)
                self.operation = ""

        return recorded

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
        return self._clock() - self.since if self.operation else 0.0


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


# Spin waits: fast for waits of microseconds, and yielding the core to the ranks that are waited for -------------------


SPINS = 200  # polls before the core is yielded to other ranks
OVERSUBSCRIBED_SPINS = 2  # the same if ranks outnumber cores: the late rank may need this core
POLLS_PER_CLOCK_READING = 4096  # polls between two readings of the clock, if a poll is cheap


class SpinWait:
    """Spin wait with a deadline: polls for a while, then yields the core between polls."""

    __slots__ = ("_spins", "_period", "_polls", "_deadline")

    def __init__(self, spins: int, period: int = POLLS_PER_CLOCK_READING) -> None:
        self._spins = spins
        self._period = period
        self._polls = 0
        self._deadline = 0.0

    def ends(self) -> bool:
        """Account for one poll and yield if due; return whether the deadline has passed."""
        self._polls += 1
        if self._polls <= self._spins:
            return False
        os.sched_yield()
        if self._polls % self._period:
            return False
        self._deadline = self._deadline or time.monotonic() + timeout_seconds()
        return time.monotonic() > self._deadline


def until(
    ready: Callable[[], bool],
    operation: str,
    timeout_message: Callable[[], str],
    spins: int = SPINS,
    period: int = POLLS_PER_CLOCK_READING,
) -> None:
    """Poll until ``ready()``; at the deadline raise ``DeadlineError`` with the text of ``timeout_message()``.

    ``period`` is the number of polls per reading of the clock: 1 if a poll is a message to another
    node and back.
    """
    if ready():
        return
    with waiting(operation):
        spin = SpinWait(spins, period)
        while not ready():
            if spin.ends():
                raise DeadlineError(timeout_message())


_PROGRESS_CALLS: list[Callable[[], None]] = []


def register_progress(call: Callable[[], None]) -> None:
    """Register a function that answers other ranks; this rank calls it while it waits."""
    if call not in _PROGRESS_CALLS:
        _PROGRESS_CALLS.append(call)


def progress() -> None:
    """Call the functions that answer other ranks."""
    for call in _PROGRESS_CALLS:
        call()
