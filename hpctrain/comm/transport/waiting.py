"""Waiting: record of this rank's blocking operation, deadlines of a thread's operations, and spin waits that yield."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING

from hpctrain import trace
from hpctrain.errors import DeadlineError, RankFailedError, SettingsError

if TYPE_CHECKING:
    from hpctrain.comm.transport.base import Recordable


class Activity:
    """Current blocking operation of this rank, its start, and the number and total time of all such operations.

    This is a class and not a generator-based context manager: it encloses every message, and a
    generator costs three times as much. Where a microsecond matters, ``begin`` and ``end`` are
    called directly. If several threads wait at once, the operation of the first one is recorded.
    """

    __slots__ = ("operation", "since", "count", "total", "translate", "_depth", "_owner", "_clock")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.operation = ""
        self.since = 0.0
        self.count = 0
        self.total = 0.0  # seconds in all completed operations
        # Returns the error to raise instead of an error of an operation with this name; None: raise it as it is.
        self.translate: Callable[[BaseException, str], BaseException | None] = lambda error, operation: None
        self._depth = 0
        self._owner = 0  # thread whose operation is recorded; 0 for none

    def begin(self, operation: str) -> None:
        """Set the blocking operation until ``end``; a nested operation keeps the outer name."""
        thread = get_ident()
        if self._owner == thread:
            self._depth += 1
        elif not self._owner:
            self._owner, self._depth = thread, 1
            self.since = self._clock()
            self.count += 1
            self.operation = operation

    def end(self) -> None:
        """End the operation of the matching ``begin``."""
        if self._owner != get_ident():
            return
        self._depth -= 1
        if not self._depth:
            self._record(self._clock())

    def _record(self, now: float) -> None:
        """Add the time of a completed operation, and record it if tracing is enabled."""
        self.total += now - self.since
        if trace.recording:
            trace.wait(self.operation, self.since, now)
        self.operation = ""
        self._owner = 0

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
            if self._owner:
                call()
                return
            self._owner, self._depth = get_ident(), 1
            self.count += 1
            self.since = clock()
            self.operation = operation
            try:
                call()
            except Exception as error:
                if (other := self.translate(error, operation)) is not None:
                    raise other from error
                raise
            finally:
                # As in ``_record``, without the cost of a call.
                now = clock()
                self.total += now - self.since
                if trace.recording:
                    trace.wait(operation, self.since, now)
                self.operation = ""
                self._owner = 0

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
        operation = self.operation if error is not None else ""
        self.end()
        if error is not None and (other := self.translate(error, operation)) is not None:
            raise other from error

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


class Limit:
    """Deadline and cancellation of the waits in a ``with`` block of one thread.

    This is a class for the reason that ``Activity`` is one: it encloses every operation of a process group.
    """

    __slots__ = ("_operation", "_seconds", "_deadline", "_cancelled", "_outer")

    def __init__(self, seconds: float, operation: str, cancelled: Callable[[], str] | None) -> None:
        self._operation, self._seconds, self._cancelled = operation, seconds, cancelled
        self._deadline = float("inf")
        self._outer: Limit | None = None

    def __enter__(self) -> Limit:
        self._outer = limits.current
        self._deadline = time.monotonic() + self._seconds
        limits.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        limits.current = self._outer

    @property
    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self._deadline - time.monotonic()

    def with_at_least(self, seconds: float) -> Limit:
        """Return a limit of the same operation that has at least these seconds left."""
        return Limit(max(self.left, seconds), self._operation, self._cancelled)

    def expired(self) -> bool:
        """Return whether the time is over; raise ``DeadlineError`` if the operation was cancelled."""
        if self._cancelled is not None and (reason := self._cancelled()):
            raise DeadlineError(f"{self._operation}: {reason}")
        return self.left < 0

    def message(self, why: str) -> str:
        """Return the message of an operation that has not completed in time."""
        return f"{self._operation} has not completed within the timeout of {self._seconds:g} s: {why}"


LATE = "a rank is late, has ended, or called another operation"


class Limits(threading.local):
    """Limit of the operation in progress in this thread, if its caller has set one."""

    current: Limit | None = None

    def within(self, seconds: float, operation: str, cancelled: Callable[[], str] | None = None) -> Limit:
        """Let waits in a ``with`` block raise ``DeadlineError``: at the deadline, or when ``cancelled()`` says why."""
        return Limit(seconds, operation, cancelled)

    def extended(self, seconds: float) -> AbstractContextManager[object]:
        """Let waits in a ``with`` block have at least these seconds, if there is a limit."""
        return nullcontext() if self.current is None else self.current.with_at_least(seconds)

    @property
    def exist(self) -> bool:
        """Return whether the caller of the operation has set a deadline."""
        return self.current is not None

    @property
    def left(self) -> float:
        """Return the seconds until the deadline; infinite without one."""
        return float("inf") if self.current is None else self.current.left

    def check(self, why: str = LATE) -> None:
        """Raise ``DeadlineError`` if the time is over, for a reason, or if the operation was cancelled."""
        if self.current is not None and self.current.expired():
            raise DeadlineError(self.current.message(why))

    def message(self, operation: str, why: str) -> str:
        """Return the message of an operation that has not completed within this thread's limit, or HPCTRAIN_TIMEOUT."""
        if self.current is not None:
            return self.current.message(why)
        return f"{operation}: {why} within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"


limits = Limits()


# Spin waits: fast for waits of microseconds, and yielding the core to the ranks that are waited for -------------------


class Interruption:
    """Reason why all spin waits of this process must end: another rank has died. Set by another thread; empty: none."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason = ""

    def check(self) -> None:
        """Raise ``RankFailedError`` if there is a reason."""
        if self.reason:
            raise RankFailedError(self.reason)


interruption = Interruption()

SPINS = 200  # polls before the core is yielded to other ranks
OVERSUBSCRIBED_SPINS = 2  # the same if ranks outnumber cores: the late rank may need this core
POLLS_PER_CLOCK_READING = 4096  # polls between two readings of the clock, if a poll is cheap
POLLS_PER_LIMIT_CHECK = 64  # the same if the operation has a limit of its own, which may be short or be cancelled


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
        if self._polls % self._period and self._polls % POLLS_PER_LIMIT_CHECK:
            return False
        interruption.check()
        if limits.current is not None:
            return limits.current.expired()
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
