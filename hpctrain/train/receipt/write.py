"""Receipt of a run (``run.json``): user, machine, versions, times and end of every attempt, reason of a failure.

The rank that ends a job is rarely the one that writes the receipt, so it writes a file of its own.
"""

from __future__ import annotations

import calendar
import getpass
import json
import os
import socket
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.util import atomic
from hpctrain.util.reading import read_json, reason
from hpctrain.util.retry import retries, writing
from hpctrain.util.text import shorten

NAME = "run.json"
LARGEST = 2**26  # bytes
FAILURE_NAME = "failure.json"
PATIENCE = 1.0  # seconds: a hanging filesystem must not keep the job from ending
_LARGEST = 1e15  # largest absolute value of a number in a receipt; token counts come closest
LATEST = 2.5e11  # seconds since the epoch: the year 9892
_LONGEST = 300  # maximum characters of a text
_SLACK = 1.0  # seconds: clocks are adjusted, and old receipts contain whole seconds only

Row = Mapping[str, Any]
Attempts = Sequence[dict[str, Any]]


class FailureRecord:
    """Failure record that a rank writes when it ends the job; ``folder`` is the run folder, ``rank`` the writer."""

    def __init__(
        self, folder: Path, rank: int, *, call: atomic.Call = atomic.call_once, patience: float = PATIENCE
    ) -> None:
        self._path, self._rank, self._call, self._patience = folder / FAILURE_NAME, rank, call, patience

    def say(self, why: str, step: int | None, **more: Any) -> None:
        """Write why the job ends; give up after ``patience`` seconds."""
        facts = {"reason": first_line(why), "rank": self._rank, "host": socket.gethostname(), "step": step, **more}
        writing = threading.Thread(target=self._write, args=({**facts, "unix_time": time.time()},), daemon=True)
        writing.start()
        writing.join(self._patience)

    @contextmanager
    def unless_completed(self, why: str, step: int | None) -> Iterator[None]:
        """Have ``why`` as the reason why the job ends, should all ranks die in the ``with`` block."""
        self.say(why, step, recovering=True)
        yield
        with suppress(OSError):  # the next start removes it, and this one continues
            self._path.unlink(missing_ok=True)

    def _write(self, facts: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the reason why the job ends has already been printed
            atomic.write_text(self._path, json.dumps(facts) + "\n", call=self._call)


def read_failure(folder: Path) -> dict[str, Any]:
    """Return the failure record of a folder; empty if there is none.

    With ``recovering``, ranks recover from the death of another one, and it counts if the job ends meanwhile.
    """
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


# A killed attempt cannot record how it ended. Rank 0 therefore writes the receipt during the run:
# when the attempt begins, after its first step and at each checkpoint. Later steps are recorded in
# ``metrics.jsonl``. The next attempt adds them to the receipt when it begins (``close_unfinished``),
# before it drops the steps that it will repeat.


class Receipt:
    """Attempts of a run; each write replaces the whole file by a rename, so readers never see a partial file.

    ``rows`` is the content of ``metrics.jsonl`` when the attempt begins. ``first_step`` in
    ``facts`` is the first step of the attempt. With ``continues``, the attempt is that of a rank that
    has died, and continues.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        rows: Sequence[Mapping[str, Any]] = (),
        started: float | None = None,
        continues: bool = False,
    ) -> None:
        self.path = folder / NAME
        before = earlier_attempts(folder)
        if continues and before:
            self._attempt: dict[str, Any] = before[-1]
            catch_up(self._attempt, rows_of(before, rows)[-1])
            self.content: dict[str, Any] = {"status": "running", "attempts": before}
            self.update(host=socket.gethostname(), pid=os.getpid())
            return
        close_unfinished(before, rows, read_failure(folder))
        drop(before, rows, facts.get("first_step", 1) - 1)
        begun = time.time() if started is None else started
        when = {"started": clock(begun), "unix_time": round(begun, 3)}
        process = {"host": socket.gethostname(), "user": _user(), "pid": os.getpid(), "folder": os.getcwd()}
        self._attempt = {**facts, **process, **when, "status": "running"}
        self.content = {"status": "running", "attempts": [*before, self._attempt]}
        self._write()
        forget_failure(folder)

    @property
    def attempt(self) -> Mapping[str, Any]:
        """Return the facts of the current attempt."""
        return self._attempt

    def update(self, **facts: Any) -> None:
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


def earlier_attempts(folder: Path) -> list[dict[str, Any]]:
    """Return the earlier attempts of a run that is about to write; move a damaged receipt aside with a warning.

    Raises ``UsageError`` if the receipt cannot be read: it may be valid, so it must not be
    replaced.
    """
    try:
        return list(read_receipt(folder).get("attempts", ()))
    except DamagedReceipt as error:
        aside = atomic.set_aside(folder / NAME)
        logger.warning("%s; it was moved to %s, and a new history begins", error, aside.name)
        return []


class DamagedReceipt(UsageError):
    """Error for a receipt that exists but is not valid."""


def clock(seconds: float) -> str:
    """Return seconds since the epoch in the receipt's format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


# Attempts without an end, and repeated steps: functions of a receipt's attempts and the rows of ``metrics.jsonl`` -----
#
# They modify the attempts that they are given.


def rows_of(attempts: Attempts, rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each attempt: a step belongs to the last attempt that began at or before this step.

    A row older than that attempt is left over from an attempt whose record is complete. Such a row
    belongs to no attempt.
    """
    firsts = [number(attempt, "first_step", 1) for attempt in attempts]
    for index in range(len(firsts) - 2, -1, -1):
        firsts[index] = min(firsts[index], firsts[index + 1])
    begun = [began(attempt) or 0.0 for attempt in attempts]
    found: list[list[Row]] = [[] for _ in attempts]
    for row in rows:
        index = bisect_right(firsts, row["step"]) - 1
        if index >= 0 and number(row, "unix_time", begun[index]) >= begun[index] - _SLACK:
            found[index].append(row)
    return found


def drop(attempts: Attempts, rows: Sequence[Row], last_step: int) -> None:
    """Count the steps after ``last_step`` as repeated, each in the attempt that computed it."""
    for attempt, own_rows in zip(attempts, rows_of(attempts, rows)):
        dropped = [row for row in own_rows if row["step"] > last_step]
        if dropped:
            attempt["repeated_steps"] = int(number(attempt, "repeated_steps")) + len(dropped)
            attempt["repeated_seconds"] = round(number(attempt, "repeated_seconds") + seconds_in(dropped), 3)


def close_unfinished(attempts: Attempts, rows: Sequence[Row], failure: Mapping[str, Any]) -> None:
    """Complete every attempt without an end; ``failure`` is the failure record of a rank that ended the job."""
    for attempt, own_rows in zip(attempts, rows_of(attempts, rows)):
        if attempt.get("status") == "running":
            catch_up(attempt, own_rows)
            is_last = attempt is attempts[-1]
            _close(attempt, failure if is_last else {})


def catch_up(attempt: dict[str, Any], rows: Sequence[Row]) -> None:
    """Add the steps that an attempt computed after its last update of the receipt."""
    tail = [row for row in rows if row["step"] > number(attempt, "step", number(attempt, "first_step", 1) - 1)]
    if not tail:
        return
    last, begun = tail[-1], began(attempt)
    attempt["step"] = last["step"]
    if (tokens := maybe(last, "tokens")) is not None:
        attempt["tokens"] = tokens
    if maybe(attempt, "step_seconds") is None:
        return  # written by an earlier version: only the metrics contain the times of its steps
    attempt["steps"] = int(number(attempt, "steps")) + len(tail)
    attempt["step_seconds"] = round(number(attempt, "step_seconds") + seconds_in(tail), 3)
    elapsed = number(attempt, "elapsed_seconds") + seconds_in(tail)
    if begun is not None:
        elapsed = max(elapsed, number(last, "unix_time", begun) - begun)
    attempt["elapsed_seconds"] = round(elapsed, 3)


def _close(attempt: dict[str, Any], failure: Mapping[str, Any]) -> None:
    begun = began(attempt)
    at = number(failure, "unix_time", -1.0)
    has_record = begun is not None and at >= begun - _SLACK
    attempt["status"] = "failed" if has_record else "killed"
    if begun is None:
        return
    if has_record:
        attempt |= {"reason": text(failure, "reason"), "failed_rank": maybe(failure, "rank")}
        attempt["failed_host"] = text(failure, "host")
        attempt["elapsed_seconds"] = round(max(number(attempt, "elapsed_seconds"), at - begun), 3)
    if "elapsed_seconds" in attempt:
        attempt["ended"] = clock(min(max(begun + number(attempt, "elapsed_seconds"), 0.0), LATEST))


def seconds_in(rows: Sequence[Row]) -> float:
    return sum(number(row, "step_seconds") for row in rows)


def number(facts: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    """Return a number from ``facts``; the default if it is missing."""
    found = maybe(facts, name)
    return default if found is None else found


def maybe(facts: Mapping[str, Any], name: str) -> float | None:
    """Return a number from ``facts``; None if it is missing or a value that no run writes."""
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -_LARGEST < value < _LARGEST else None  # both comparisons are false for NaN


def text(facts: Mapping[str, Any], name: str) -> str | None:
    """Return a text from ``facts``, truncated if it is long; None if it is missing or neither text nor number."""
    value = facts.get(name)
    if isinstance(value, str):
        return shorten(value, _LONGEST) or None
    return None if maybe(facts, name) is None else str(value)


def began(attempt: Mapping[str, Any]) -> float | None:
    """Return the start of an attempt in seconds since the epoch."""
    exact = maybe(attempt, "unix_time")
    begun = seconds_since_epoch(attempt.get("started")) if exact is None else exact
    return begun if begun is not None and 0 <= begun < LATEST else None


def seconds_since_epoch(text: Any) -> float | None:
    """Return the seconds since the epoch of a time such as ``2026-01-31T12:00:00Z``."""
    try:
        return float(calendar.timegm(time.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ")))
    except (ValueError, OverflowError):
        return None
