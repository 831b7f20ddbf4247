"""Count what the time of an attempt goes into, as it goes: start-up, steps, waiting for checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hpctrain.train.lock_holder import process_started


class Tally:
    """Be told of every step and every wait; ``age`` is how many seconds ago the attempt began.

    Without one, the attempt began with its process, as the import of a large library is a part of what a start costs;
    but a process that makes several runs has started up for the first of them alone.
    """

    _first_taken: ClassVar[bool] = False

    def __init__(self, age: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if age is None:
            age = 0.0 if Tally._first_taken else process_age()
            Tally._first_taken = True
        self._clock, self._began = clock, clock() - age
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
        """Tell whether no step has been done yet."""
        return self._startup is None

    def step(self, row: Mapping[str, Any]) -> None:
        """Note the numbers of a step that has just ended."""
        seconds = row.get("step_seconds", 0.0)
        if self._startup is None:
            self._startup = max(self.elapsed - self._save_seconds - seconds, 0.0)
        self._step, self._tokens = row["step"], row.get("tokens", self._tokens)
        self._steps += 1
        self._step_seconds += seconds

    def rewind(self, last_step: int) -> None:
        """Go back to a step; the time that was spent is spent."""
        self._step = last_step

    def waited(self, seconds: float) -> None:
        """Note how long the run has just waited for a checkpoint."""
        self._save_seconds += seconds

    def facts(self) -> dict[str, Any]:
        """Return what a receipt says of it; before the first step, all time is start-up."""
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
        }


def process_age() -> float:
    """Return how many seconds ago this process started; 0 where the system does not say."""
    ticks = process_started(os.getpid())
    if ticks is None:
        return 0.0
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
