"""Running totals of an attempt's time: startup, steps, waits for checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hpctrain.train.lock_holder import process_started
from hpctrain.util.retry import retries


class Tally:
    """Time accounting of the current attempt; ``age`` is the number of seconds since the attempt began.

    By default, the attempt began when its process started, because the import of a large library is
    part of the startup cost. If a process makes several runs, only the first one has this startup
    time.
    """

    _first_taken: ClassVar[bool] = False

    def __init__(self, age: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if age is None:
            age = 0.0 if Tally._first_taken else process_age()
            Tally._first_taken = True
        self._clock, self._began = clock, clock() - age
        self._repeated = retries.count, retries.seconds
        self._startup: float | None = None
        self._step: int | None = None
        self._tokens: float | None = None
        self._steps = 0
        self._step_seconds = self._save_seconds = 0.0

    @property
    def elapsed(self) -> float:
        """Return the seconds since the attempt began."""
        return self._clock() - self._began

    @property
    def is_starting(self) -> bool:
        """Return whether no step has been completed yet."""
        return self._startup is None

    def step(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of a step that has just ended."""
        seconds = row.get("step_seconds", 0.0)
        if self._startup is None:
            self._startup = max(self.elapsed - self._save_seconds - seconds, 0.0)
        self._step, self._tokens = row["step"], row.get("tokens", self._tokens)
        self._steps += 1
        self._step_seconds += seconds

    def rewind(self, last_step: int) -> None:
        """Roll back to a step; the time already spent is kept."""
        self._step = last_step

    def waited(self, seconds: float) -> None:
        """Add the seconds of a wait for a checkpoint."""
        self._save_seconds += seconds

    def facts(self) -> dict[str, Any]:
        """Return the facts for the receipt; before the first step, all time is startup."""
        elapsed = self.elapsed
        startup = elapsed - self._save_seconds if self._startup is None else self._startup
        seconds = {
            "elapsed_seconds": elapsed,
            "startup_seconds": startup,
            "step_seconds": self._step_seconds,
            "save_seconds": self._save_seconds,
        }
        last = {"step": self._step, "tokens": self._tokens}
        return {
            **{name: round(value, 3) for name, value in seconds.items()},
            "steps": self._steps,
            **{name: value for name, value in last.items() if value is not None},
            **retries.facts(self._repeated),
        }


def process_age() -> float:
    """Return the seconds since this process started; 0 if the system does not report it."""
    ticks = process_started(os.getpid())
    if ticks is None:
        return 0.0
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
