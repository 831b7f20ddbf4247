"""State of a run, from the files in its folder: status, progress, rates, time left, what went wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.train import metrics
from hpctrain.train.receipt.read import is_over, recoveries_in, slow_ranks_in, why_ended
from hpctrain.train.receipt.write import NAME, maybe, number, read_failure, read_receipt, text
from hpctrain.watch.rows import RARE, MetricsFile, Row

RECENT = 50  # rows over which rates are averaged
SILENT = 120.0  # seconds without a step, and 20 steps, after which a running run is said to be silent
_NOT_VALUES = (*metrics.TIMES, "step", "tokens", "samples", "unix_time", "lost_ranks", "skipped")


@dataclass(frozen=True)
class RunState:
    """State of a run at a moment; None for what is unknown."""

    folder: Path
    status: str  # running, finished, stopped, failed, killed or unreadable
    why: str  # in words
    step: int
    target: int | None
    values: dict[str, float]  # the newest of each name in the last rows
    steps_a_second: float | None
    rate: tuple[float, str] | None  # tokens or samples per second
    silent: float | None  # seconds since the last step, if they are many
    left: float | None  # seconds to the last step
    job_left: float | None  # seconds to the end of the job
    shares: dict[str, float] = field(default_factory=dict)  # fractions of the time of the last rows, by what it was for
    attempt: Mapping[str, Any] = field(default_factory=dict)  # facts of the last start
    attempts: tuple[Mapping[str, Any], ...] = ()  # facts of all starts
    failures: int = 0  # earlier starts that failed or were killed
    notes: tuple[str, ...] = ()  # what a reader should know: slow ranks, dead ranks, memory errors, failed saves

    @property
    def starts(self) -> int:
        return len(self.attempts)

    @property
    def fraction(self) -> float | None:
        return min(self.step / self.target, 1.0) if self.target else None


def read_state(folder: Path, now: float | None = None) -> RunState:
    """Return the state of a run. Raises ``UsageError`` if the folder has no readable ``run.json``."""
    now = time.time() if now is None else now
    attempts = list(read_receipt(folder).get("attempts", ()))
    if not attempts:
        raise UsageError(f"{folder} {_missing(folder)}; name the folder of a run, as runs/gpt-tiny")
    last = dict(attempts[-1])
    status = _settled(folder, last)
    try:
        with MetricsFile.opened(folder / metrics.NAME) as file:
            rows = file.last(RECENT)
    except OSError:
        rows = []
    step = rows[-1]["step"] if rows else int(number(last, "step", number(last, "first_step", 1) - 1))
    begun = number(last, "unix_time")
    own = [row for row in rows if number(row, "unix_time", -1.0) >= begun]  # of this start
    speed, rate = _rates(own, last)
    target = maybe(last, "target_step")
    runs = status == "running"
    age = now - float(own[-1]["unix_time"]) if runs and own else 0.0
    left = (target - step) / speed if runs and target and speed else None
    ends = maybe(last, "job_ends")
    last["status"], last["step"] = status, step
    return RunState(
        folder=folder,
        status=status,
        why=why_ended(last) if not runs else "",
        step=step,
        target=None if target is None else max(int(target), step),
        values=_values(rows),
        steps_a_second=speed,
        rate=rate,
        silent=age if speed and age > max(SILENT, 20 / speed) else None,
        left=None if left is None else max(left, 0.0),
        job_left=max(ends - now, 0.0) if runs and ends is not None else None,
        shares=_shares(own),
        attempt=last,
        attempts=(*attempts[:-1], last),
        failures=sum(one.get("status") in ("failed", "killed", "running") for one in attempts[:-1]),
        notes=tuple(_notes(last, attempts)),
    )


def _missing(folder: Path) -> str:
    if folder.is_dir():
        return f"is no run, or has not begun: it has no {NAME}"
    return "is a file" if folder.exists() else "does not exist"


def unreadable(folder: Path, why: str) -> RunState:
    """Return the state of a run whose files cannot be read."""
    return RunState(folder, "unreadable", why, 0, None, {}, None, None, None, None, None)


def _settled(folder: Path, last: dict[str, Any]) -> str:
    """Return the status of the last start, also if it could not record its end; add the reason to its facts."""
    status = text(last, "status") or "unknown"
    if status != "running":
        return status
    failure = read_failure(folder)
    if (not failure or failure.get("recovering")) and not is_over(folder, last):
        return "running"
    last |= {name: failure[name] for name in ("reason", "failed_rank") if name in failure}
    return "failed" if failure else "killed"


def _rates(rows: Sequence[Row], attempt: Mapping[str, Any]) -> tuple[float | None, tuple[float, str] | None]:
    """Return steps per second, and tokens or samples per second, over the last rows of this start."""
    if len(rows) < 2:
        return None, None
    seconds, steps = rows[-1]["unix_time"] - rows[0]["unix_time"], rows[-1]["step"] - rows[0]["step"]
    if seconds <= 0 or steps <= 0:
        return None, None
    for name in ("tokens", "samples"):
        first, final = maybe(rows[0], name), maybe(rows[-1], name)
        if first is not None and final is not None and final > first:
            return steps / seconds, ((final - first) / seconds, name)
    batch = maybe(attempt, "batch")
    return steps / seconds, (batch * steps / seconds, "samples") if batch else None


def _values(rows: Sequence[Row]) -> dict[str, float]:
    """Return the newest value of each logged name."""
    found: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NOT_VALUES and type(value) in (int, float) and math.isfinite(value):
                found[name] = float(value)
    return found


def is_validation(name: str) -> bool:
    """Return whether a value is one of data that the run does not train on, by its name."""
    return name.lower().startswith(RARE[:4])


def _shares(rows: Sequence[Row]) -> dict[str, float]:
    """Return the fractions of the time between the first and the last row, by what it was used for."""
    if len(rows) < 2 or "data_seconds" not in rows[-1]:
        return {}
    whole = rows[-1]["unix_time"] - rows[0]["unix_time"]
    if whole <= 0:
        return {}
    found = metrics.uses_of(rows[1:], whole)
    total = sum(found.values())
    return {name: seconds / total for name, seconds in found.items()}


def _notes(last: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    for one in list(slow_ranks_in(last.get("slow_ranks")))[-3:]:
        notes.append(f"rank {one['rank']} on {one['host']} is slow from step {one['first_step']} on: {one['cause']}")
    for one in list(recoveries_in(last.get("recoveries")))[-3:]:
        notes.append(f"rank {', '.join(one['ranks']) or 'unknown'} died in step {one['step']}; the others continued")
    if errors := int(number(last, "memory_errors")):
        notes.append(f"{errors} memory errors found and repaired")
    if failed := int(number(last, "failed_saves")):
        notes.append(f"{failed} checkpoints could not be written")
    if len(attempts) > 1:
        notes.append(f"start {len(attempts)}: the one before {why_ended(attempts[-2])}")
    return notes
