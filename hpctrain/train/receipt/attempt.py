"""Accounting of every attempt of a run from its receipt: where the time was spent, and how much of it counted.

Pure functions of a receipt's attempts and the rows of ``metrics.jsonl``. They modify the attempts
that they are given.
"""

from __future__ import annotations

import calendar
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


# Accounting of every attempt of a run from its receipt: where the time was spent, and how much of it counted ----------
#
# Pure functions; no torch, no MPI.


Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """Accounting of one start of a run; times in seconds, of the whole attempt.

    ``startup``, ``useful``, ``repeated``, ``saves`` and ``other`` add up to ``elapsed``.
    """

    index: int  # from 1
    status: str  # running, finished, stopped, failed or killed
    why: str  # in words
    started: float | None  # since the epoch
    nodes: int
    ranks: int
    cpus: int | None
    gpus: int | None
    host: str
    job_id: str | None
    scheduler: str | None
    restart_count: int | None
    first_step: int
    last_step: int
    steps: int  # steps that counted
    repeated_steps: int
    tokens: int | None
    samples: int | None
    elapsed: float
    startup: float
    useful: float
    repeated: float
    saves: float

    @property
    def other(self) -> float:
        """Return the seconds in no other category: rollback after a NaN, hangs, shutdown."""
        return max(self.elapsed - self.startup - self.useful - self.repeated - self.saves, 0.0)

    @property
    def node_hours(self) -> float:
        """Return nodes times hours."""
        return self.nodes * self.elapsed / 3600


def saved_step(attempt: Facts) -> int:
    """Return the step of the newest checkpoint that an attempt has written, or the step from which it resumed."""
    before = number(attempt, "first_step", 1) - 1
    return int(number(attempt, "saved_step", number(attempt, "step", before)))


def attempts_from(attempts: Sequence[dict[str, Any]], rows: Sequence[Row]) -> list[Attempt]:
    """Return the attempts of an up-to-date receipt; ``rows`` are the rows of the metrics."""
    counted = _tokens(attempts, rows)
    own_rows = rows_of(attempts, rows)
    return [_attempt(index + 1, one, own_rows[index], counted[index]) for index, one in enumerate(attempts)]


def _attempt(index: int, facts: Facts, rows: Sequence[Row], tokens: int | None) -> Attempt:
    first = int(number(facts, "first_step", 1))
    useful, steps = _counted(facts, rows)
    batch = maybe(facts, "batch")
    return Attempt(
        index=index,
        status=text(facts, "status") or "unknown",
        why=_why(facts),
        started=began(facts),
        nodes=int(number(facts, "nodes", 1)),
        ranks=int(number(facts, "size", 1)),
        cpus=_whole(facts, "cpus"),
        gpus=_whole(facts, "gpus"),
        host=text(facts, "host") or "",
        job_id=text(facts, "job_id"),
        scheduler=text(facts, "scheduler"),
        restart_count=_whole(facts, "restart_count"),
        first_step=first,
        last_step=int(number(facts, "step", first - 1)),
        steps=steps,
        repeated_steps=int(number(facts, "repeated_steps")),
        tokens=tokens,
        samples=None if batch is None else steps * int(batch),
        elapsed=_elapsed(facts, useful),
        startup=number(facts, "startup_seconds"),
        useful=useful,
        repeated=number(facts, "repeated_seconds"),
        saves=number(facts, "save_seconds"),
    )


def _counted(facts: Facts, rows: Sequence[Row]) -> tuple[float, int]:
    """Return the seconds in steps that counted, and the number of these steps.

    Receipts of an earlier version contain no times. For these, the times of the steps that were
    kept are taken from the metrics.
    """
    if maybe(facts, "step_seconds") is None:
        kept = [row for row in rows if row["step"] <= saved_step(facts)]
        return seconds_in(kept), len(kept)
    seconds = number(facts, "step_seconds") - number(facts, "repeated_seconds")
    return max(seconds, 0.0), max(int(number(facts, "steps") - number(facts, "repeated_steps")), 0)


def _elapsed(facts: Facts, useful: float) -> float:
    begun, ended = began(facts), seconds_since_epoch(facts.get("ended"))
    noted = ended - begun if begun is not None and ended is not None else 0.0
    return number(facts, "elapsed_seconds", max(noted, useful + number(facts, "repeated_seconds")))


def _whole(facts: Facts, name: str) -> int | None:
    found = maybe(facts, name)
    return None if found is None else int(found)


def _tokens(attempts: Sequence[Facts], rows: Sequence[Row]) -> list[int | None]:
    """Return the tokens of each attempt that counted: up to the point from which later attempts resumed."""
    last = attempts[-1]
    end = maybe(last, "tokens")
    if last.get("status") in ("failed", "killed"):
        kept = [maybe(row, "tokens") for row in rows if row["step"] <= saved_step(last)]
        saved = [tokens for tokens in kept if tokens is not None]
        end = saved[-1] if saved else maybe(last, "tokens_before")
    found: list[int | None] = []
    for attempt in reversed(attempts):
        before = maybe(attempt, "tokens_before")
        known = end is not None and before is not None and "tokens" in attempt
        found.append(max(int((end or 0) - (before or 0)), 0) if known else None)
        end = min((at for at in (before, end) if at is not None), default=None)
    return found[::-1]


def _why(facts: Facts) -> str:
    """Return in one line how an attempt ended."""
    reason, status = text(facts, "reason") or "", text(facts, "status")
    if status == "stopped":
        return f"saved: {reason}" if reason else "saved"
    if status == "failed":
        rank = text(facts, "failed_rank")
        by = "" if rank is None else f" on rank {rank}"
        return f"failed{by}: {reason}" if reason else f"failed{by}"
    if status == "killed":
        return f"killed (no exit record); last recorded step {number(facts, 'step', 0)}"
    if status == "running":
        return f"running, last recorded {_ago(facts)}"
    return status or "unknown"


def _ago(facts: Facts) -> str:
    begun = began(facts)
    if begun is None:
        return f"after step {number(facts, 'step', 0)}"
    at = min(max(begun + number(facts, "elapsed_seconds"), 0.0), LATEST)
    seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return f"{seen} after step {number(facts, 'step', 0)}"
