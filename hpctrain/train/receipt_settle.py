"""Completion of the records of earlier attempts: the end of a killed attempt, and the steps that must be repeated.

Pure functions of a receipt's attempts and the rows of ``metrics.jsonl``. They modify the attempts
that they are given.
"""

from __future__ import annotations

import calendar
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.util.text import shorten

Row = Mapping[str, Any]
Attempts = Sequence[dict[str, Any]]
_LARGEST = 1e15  # largest absolute value of a number in a receipt; token counts come closest
LATEST = 2.5e11  # seconds since the epoch: the year 9892
_LONGEST = 300  # maximum characters of a text
_SLACK = 1.0  # seconds: clocks are adjusted, and old receipts contain whole seconds only


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
    for attempt, mine in zip(attempts, rows_of(attempts, rows)):
        gone = [row for row in mine if row["step"] > last_step]
        if gone:
            attempt["repeated_steps"] = int(number(attempt, "repeated_steps")) + len(gone)
            attempt["repeated_seconds"] = round(number(attempt, "repeated_seconds") + seconds_in(gone), 3)


def close_unfinished(attempts: Attempts, rows: Sequence[Row], said: Mapping[str, Any]) -> None:
    """Complete every attempt without an end; ``said`` is the failure record of a rank that ended the job."""
    for attempt, mine in zip(attempts, rows_of(attempts, rows)):
        if attempt.get("status") == "running":
            catch_up(attempt, mine)
            is_last = attempt is attempts[-1]
            _close(attempt, said if is_last else {})


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


def _close(attempt: dict[str, Any], said: Mapping[str, Any]) -> None:
    begun = began(attempt)
    at = number(said, "unix_time", -1.0)
    spoke = begun is not None and at >= begun - _SLACK
    attempt["status"] = "failed" if spoke else "killed"
    if begun is None:
        return
    if spoke:
        attempt |= {"reason": text(said, "reason"), "failed_rank": maybe(said, "rank")}
        attempt["failed_host"] = text(said, "host")
        attempt["elapsed_seconds"] = round(max(number(attempt, "elapsed_seconds"), at - begun), 3)
    if "elapsed_seconds" in attempt:
        ended = time.gmtime(min(max(begun + number(attempt, "elapsed_seconds"), 0.0), LATEST))
        attempt["ended"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", ended)


def seconds_in(rows: Sequence[Row]) -> float:
    """Return the total seconds of some steps."""
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
