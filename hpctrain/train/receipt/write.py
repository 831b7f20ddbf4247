"""Receipt of a run (``run.json``): user, machine, versions, times and end of every attempt, reason of a failure.

The rank that ends a job is rarely the one that writes the receipt, so it writes a file of its own.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.train.lock import process_started
from hpctrain.train.receipt.attempt import close_unfinished, drop
from hpctrain.util import atomic
from hpctrain.util.reading import read_json, reason
from hpctrain.util.retry import retries, writing

FAILURE_NAME = "failure.json"
PATIENCE = 1.0  # seconds: a hanging filesystem must not keep the job from ending


class FailureRecord:
    """Failure record that a rank writes when it ends the job; ``folder`` is the run folder, ``rank`` the writer."""

    def __init__(self, folder: Path, rank: int, *, call: atomic.Call = atomic.call_once) -> None:
        self._path, self._rank, self._call = folder / FAILURE_NAME, rank, call

    def say(self, why: str, step: int | None) -> None:
        """Write why the job ends; give up after one second."""
        facts = {"reason": first_line(why), "rank": self._rank, "host": socket.gethostname(), "step": step}
        writing = threading.Thread(target=self._write, args=({**facts, "unix_time": time.time()},), daemon=True)
        writing.start()
        writing.join(PATIENCE)

    def _write(self, facts: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the reason why the job ends has already been printed
            atomic.write_text(self._path, json.dumps(facts) + "\n", call=self._call)


def read_failure(folder: Path) -> dict[str, Any]:
    """Return the failure record of a folder; empty if there is none."""
    try:
        found = read_json(folder / FAILURE_NAME)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def forget_failure(folder: Path) -> None:
    """Remove the failure record after it has been copied into the receipt."""
    with writing(folder / FAILURE_NAME):
        (folder / FAILURE_NAME).unlink(missing_ok=True)


def first_line(text: str, longest: int = 300) -> str:
    """Return the first non-empty line of an error message, truncated to ``longest`` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= longest else line[: longest - 3] + "..."


# Running totals of an attempt's time: startup, steps, waits for checkpoints -------------------------------------------


class TimeAccounting:
    """Time accounting of the current attempt; ``age`` is the number of seconds since the attempt began.

    By default, the attempt began when its process started, because the import of a large library is
    part of the startup cost. If a process makes several runs, only the first one has this startup
    time.
    """

    _first_taken: ClassVar[bool] = False

    def __init__(self, age: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if age is None:
            age = 0.0 if TimeAccounting._first_taken else process_age()
            TimeAccounting._first_taken = True
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


# Receipt of a run (``run.json``): user, machine, versions, and the end and times of every attempt ---------------------
#
# A killed attempt cannot record how it ended. Rank 0 therefore writes the receipt during the run:
# when the attempt begins, after its first step and at each checkpoint. Later steps are recorded in
# ``metrics.jsonl``. The next attempt adds them to the receipt when it begins (``receipt_settle``),
# before it drops the steps that it will repeat.


NAME = "run.json"
LARGEST = 2**26  # bytes


class Receipt:
    """Attempts of a run; each write replaces the whole file by a rename, so readers never see a partial file.

    ``rows`` is the content of ``metrics.jsonl`` when the attempt begins. ``first_step`` in
    ``facts`` is the first step of the attempt.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        rows: Sequence[Mapping[str, Any]] = (),
        started: float | None = None,
    ) -> None:
        self.path = folder / NAME
        before = earlier_attempts(folder)
        close_unfinished(before, rows, read_failure(folder))
        drop(before, rows, facts.get("first_step", 1) - 1)
        begun = time.time() if started is None else started
        when = {"started": clock(begun), "unix_time": round(begun, 3)}
        self._attempt: dict[str, Any] = {**facts, **_process_facts(), **when, "status": "running"}
        self.content: dict[str, Any] = {"status": "running", "attempts": [*before, self._attempt]}
        self._write()
        forget_failure(folder)

    def update(self, **facts: Any) -> None:
        """Add facts to the current attempt."""
        self._attempt.update(facts)
        self._write()

    def rewind(self, rows: Sequence[Mapping[str, Any]], last_step: int) -> None:
        """Count the steps after ``last_step`` as repeated: the current attempt rolls back and continues."""
        drop(self.content["attempts"], rows, last_step)
        first = self._attempt.get("first_step", 1)
        self.update(step=last_step, first_step=min(first, last_step + 1))

    def end(self, status: str, **facts: Any) -> None:
        """Record how the attempt ended: finished, stopped or failed."""
        self._attempt.update(facts, status=status, ended=clock(time.time()))
        self.content["status"] = status
        self._write()

    def _write(self) -> None:
        retries.call(atomic.write_text, self.path, json.dumps(self.content, indent=2) + "\n")


def read_receipt(folder: Path) -> dict[str, Any]:
    """Return the content of ``run.json`` in a folder; empty only if the file does not exist.

    Raises ``UsageError`` if the file cannot be read, and ``DamagedReceipt`` if its content is not
    valid.
    """
    path = folder / NAME
    try:
        content = retries.call(read_json, path, LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        advice = "make it readable, or move it away to begin a new history"
        raise UsageError(f"cannot read the history of the run in {path}: {reason(error)}; {advice}") from error
    except ValueError as error:
        raise DamagedReceipt(f"{path} is damaged: {error}; move it away to begin a new history") from error
    attempts = content.get("attempts") if isinstance(content, dict) else None
    if not isinstance(attempts, list) or not all(isinstance(one, dict) for one in attempts):
        raise DamagedReceipt(f"{path} is damaged: it has no list of attempts; move it away to begin a new history")
    found: dict[str, Any] = content
    return found


def attempts_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the attempts in a receipt."""
    return list(content.get("attempts", ()))


def earlier_attempts(folder: Path) -> list[dict[str, Any]]:
    """Return the earlier attempts of a run that is about to write; move a damaged receipt aside with a warning.

    Raises ``UsageError`` if the receipt cannot be read: it may be valid, so it must not be
    replaced.
    """
    try:
        return attempts_of(read_receipt(folder))
    except DamagedReceipt as error:
        aside = atomic.set_aside(folder / NAME)
        logger.warning("%s; it was moved to %s, and a new history begins", error, aside.name)
        return []


class DamagedReceipt(UsageError):
    """Error for a receipt that exists but is not valid."""


def clock(seconds: float) -> str:
    """Return seconds since the epoch in the receipt's format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _process_facts() -> dict[str, Any]:
    return {"host": socket.gethostname(), "user": _user(), "pid": os.getpid(), "folder": os.getcwd()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
