"""Metrics log with one JSON object per step, the curves that checkpoints contain, and the progress display."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.log import logger
from hpctrain.util import atomic
from hpctrain.util.reading import parse_json, read_lines
from hpctrain.util.retry import retries

NAME = "metrics.jsonl"
CURVES = ("loss", "learning_rate", "grad_norm")
HISTOGRAMS = ("staleness_histogram",)  # lists of counts that are summed over the run
USES = ("data", "forward", "backward", "communication", "optimizer", "save", "evaluation")
TIMES = ("step_seconds", *(f"{use}_seconds" for use in USES))
_SHOWN = {"save": "saving"}
# Values of a row without a curve of their own, or with a curve that is added separately.
_APART = (*CURVES, *HISTOGRAMS, *TIMES, "step", "tokens", "skipped", "lost_ranks")
LONGEST = 10_000  # points per curve in a checkpoint: more than a plot shows, less than 1 MB in total
_STEPS = 2**53  # more steps than any run makes


class Metrics:
    """Writer of ``metrics.jsonl`` in a run folder; on resume, rows after the resumed step are removed.

    Each step therefore has at most one row, however often the run was killed. Every method raises
    ``OSError`` if the file cannot be written.
    """

    def __init__(self, folder: Path, last_step: int, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.path = folder / NAME
        self._handle, self._identity = self._shortened(last_step, rows)

    def write(self, row: dict[str, Any]) -> None:
        """Append one object; NaN is written as null, because JSON has no NaN."""
        line = json.dumps(finite(row))
        atomic.append_line(self._handle, line, call=retries.call)

    def has_moved(self) -> bool:
        """Return whether the path has no file, or another file than the open one: rows would not be found there."""
        if self._handle < 0:
            return False
        try:
            found = retries.call(os.lstat, self.path)
        except FileNotFoundError:
            return True
        return (found.st_dev, found.st_ino) != self._identity

    def reopen(self) -> None:
        """Open the file that the path now names, or a new one; the next rows are appended to it."""
        opened = self._opened()
        self.close()
        self._handle, self._identity = opened

    def rewind(self, last_step: int, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Remove the rows of all steps after ``last_step``; ``rows`` is the content of the file if known."""
        self.close()
        self._handle, self._identity = self._shortened(last_step, rows)

    def close(self) -> None:
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)

    def _shortened(self, last_step: int, rows: Sequence[Mapping[str, Any]] | None) -> tuple[int, tuple[int, int]]:
        found = read(self.path) if rows is None else rows
        kept = [json.dumps(row) + "\n" for row in found if row["step"] <= last_step]
        if os.path.lexists(self.path):
            retries.call(atomic.write_text, self.path, "".join(kept))
        return self._opened()

    def _opened(self) -> tuple[int, tuple[int, int]]:
        """Return a descriptor of the file, and the device and inode by which ``has_moved`` knows it."""
        handle = retries.call(atomic.open_growing, self.path)
        status = os.fstat(handle)
        return handle, (status.st_dev, status.st_ino)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; see ``scan``. Raises ``OSError``."""
    return scan(path)[0]


def scan(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the rows of a metrics file, and the numbers of the lines that are damaged. Raises ``OSError``.

    An incomplete last line is neither: a killed run leaves it. A missing file has no rows.
    """
    try:
        lines = retries.call(lambda: list(read_lines(path)))
    except FileNotFoundError:
        return [], []
    rows, damaged = [], []
    for number, line in enumerate(lines, 1):
        row = row_of(line)
        if row is not None:
            rows.append(row)
        elif line is None or line.endswith("\n") and line.strip():
            damaged.append(number)
    return rows, damaged


def row_of(line: str | None) -> dict[str, Any] | None:
    """Return the object of a line; None if it is not a row of metrics."""
    with suppress(ValueError):
        row = parse_json(line or "")
        if isinstance(row, dict) and type(row.get("step")) is int and abs(row["step"]) < _STEPS:
            return row
    return None


def finite(value: Any) -> Any:
    """Return plain values with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def uses_of(rows: Sequence[Mapping[str, Any]], whole: float) -> dict[str, float]:
    """Return by use the seconds of some steps, and the rest of ``whole``, in the order in which they should be shown.

    Rows of earlier versions do not have the times of passes.
    """
    names = [use for use in USES if any(f"{use}_seconds" in row for row in rows)]
    found = {_SHOWN.get(use, use): sum(_seconds(row, f"{use}_seconds") for row in rows) for use in names}
    rest = "other" if "forward" in found else "forward, backward and other"
    return {**found, rest: max(whole - sum(found.values()), 0.0)}


def _seconds(row: Mapping[str, Any], name: str) -> float:
    value: Any = row.get(name)
    return max(float(value), 0.0) if type(value) in (int, float) and math.isfinite(value) else 0.0


class Curves:
    """Curves of a run as plain lists, to be plotted from its checkpoint, and the sums of its histograms.

    Every logged number has a curve. A name that is not in ``CURVES`` may be missing in some steps;
    the steps that have it are the curve ``NAME_step``. Names that end in ``_step`` have no curve.

    A curve has at most ``longest`` points. A longer curve is thinned: its range of steps is divided
    into ``longest // 2`` equal intervals, and the last point of each interval is kept.
    ``metrics.jsonl`` contains all points.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self.columns: dict[str, list[float]] = {}
        self._longest = longest

    def add(self, row: dict[str, Any]) -> None:
        """Add the numbers of a step."""
        for name in ("step", *CURVES):
            self.columns.setdefault(name, []).append(float(row.get(name, math.nan)))
        self._thin("step", *CURVES)
        for name, value in row.items():
            if name not in _APART and not name.endswith("_step") and isinstance(value, (int, float)):
                steps = "validation_step" if name == "validation_loss" else f"{name}_step"
                self.columns.setdefault(steps, []).append(float(row["step"]))
                self.columns.setdefault(name, []).append(float(value))
                self._thin(steps, name)
        for name in HISTOGRAMS:
            if name in row:
                pairs = itertools.zip_longest(self.columns.get(name, []), row[name], fillvalue=0.0)
                self.columns[name] = [total + count for total, count in pairs]

    def _thin(self, by: str, *others: str) -> None:
        """Remove points if there are too many; the result depends on the points only, so a resumed run agrees."""
        steps = self.columns[by]
        if len(steps) <= self._longest:
            return
        first, stretches = steps[0], self._longest // 2
        width = (steps[-1] - first) / stretches or 1.0
        last = {min(int((step - first) / width), stretches - 1): index for index, step in enumerate(steps)}
        for name in (by, *others):
            if len(self.columns[name]) == len(steps):  # missing in an older file: it began later and is not thinned
                self.columns[name] = [self.columns[name][index] for index in last.values()]


# Progress display of a run, on rank 0 only: a bar on a terminal, otherwise a log line every few seconds ---------------

SAMPLES = "samples"  # since the beginning of the run: in rows of data without tokens
LINE_EVERY = 10.0  # seconds between two lines without a terminal


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the displayed values of a step's row, by short name."""
    labels = {"loss": "loss", "validation_loss": "validation"}
    found = {label: f"{row[name]:.4f}" for name, label in labels.items() if name in row}
    if isinstance(row.get("fingerprint"), str):
        found["fingerprint"] = row["fingerprint"]
    return found | ({SAMPLES: str(row[SAMPLES])} if SAMPLES in row else {})


class ExpectedUpdates:
    """Estimate of the updates that remain of ``passes`` passes, from the batches per update seen since the start.

    ``length`` is the number of batches per pass. A position is the number of a pass and the number
    of its batches that have been used. Until the first update, one batch per update is assumed.
    """

    def __init__(self, length: int, passes: int, position: tuple[int, int] = (0, 0)) -> None:
        self._length, self._passes, self._position = length, passes, position
        self._batches = 1  # per update
        self._flushes = False  # whether a pass ends with an update by the batches that are left

    def note(self, batches: int, position: tuple[int, int]) -> None:
        """Note an update by the gradients of a number of batches, and the position after it."""
        self._position = position
        used = position[1]
        if batches > used:
            return  # some gradients are from the pass before
        if used < self._length:
            self._batches = batches
        else:
            self._flushes = batches < self._batches
            self._batches = max(self._batches, batches)

    @property
    def remaining(self) -> int:
        """Number of updates that are expected after the last one noted."""
        number, used = self._position
        whole_passes = self._passes - number - 1
        return self._updates(self._length - used) + max(whole_passes, 0) * self._updates(self._length)

    def _updates(self, batches: int) -> int:
        whole, left = divmod(max(batches, 0), self._batches)
        return whole + (self._flushes and left > 0)


class Progress:
    """Display of the steps done, metrics, tokens/s or samples/s, and the remaining time."""

    def __init__(
        self, first: int, last: int | None, tokens: int, *, shown: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first, self._last, self._tokens = first, last, tokens
        self._shown = shown
        self._bar: Any = None
        self._facts: dict[str, str] = {}
        self._clock = clock
        self._begun = self._last_line = clock()
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=last, initial=first, unit="step", dynamic_ncols=True, smoothing=0.05)

    def update(self, step: int, tokens: int, facts: dict[str, str]) -> None:
        """Display a completed step; each fact stays until it changes.

        ``tokens`` counts from the beginning of the run, as does the fact ``samples``. Either is
        displayed as a rate.
        """
        self._facts.update(facts)
        if not self._shown:
            return
        now = self._clock()
        shown = dict(self._facts)
        if tokens > self._tokens:
            shown["tokens/s"] = f"{(tokens - self._tokens) / (now - self._begun):,.0f}"
        if SAMPLES in shown:
            batch = int(shown.pop(SAMPLES)) / step
            shown["samples/s"] = f"{batch * (step - self._first) / (now - self._begun):,.0f}"
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif now - self._last_line >= LINE_EVERY or step == self._last:
            self._last_line = now
            logger.info("%s", self._line(step, now, shown))

    def expect(self, last: int) -> None:
        self._last = last
        if self._bar is not None:
            self._bar.total = last

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _line(self, step: int, now: float, facts: dict[str, str]) -> str:
        parts = [f"step {step}" + (f"/{self._last}" if self._last else "")]
        parts += [f"{name} {value}" for name, value in facts.items()]
        if self._last and step > self._first:
            left = round((now - self._begun) / (step - self._first) * (self._last - step))
            parts.append(f"ETA {left // 60}:{left % 60:02d}")
        return "  ".join(parts)
