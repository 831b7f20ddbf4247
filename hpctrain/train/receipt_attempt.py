"""Accounting of every attempt of a run from its receipt: where the time was spent, and how much of it counted.

Pure functions; no torch, no MPI.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.train.receipt_settle import (
    LATEST,
    Row,
    began,
    maybe,
    number,
    rows_of,
    seconds_in,
    seconds_since_epoch,
    text,
)

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
    mine = rows_of(attempts, rows)
    return [_attempt(index + 1, one, mine[index], counted[index]) for index, one in enumerate(attempts)]


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
