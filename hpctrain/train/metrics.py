"""Write what happened, one JSON object a step, and keep the curves for the checkpoint."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from hpctrain.util import atomic
from hpctrain.util.reading import parse_json, read_lines

NAME = "metrics.jsonl"
CURVES = ("loss", "learning_rate", "grad_norm")
HISTOGRAMS = ("staleness_histogram",)  # lists of counts that are added up over the run
# Numbers of a row that are no curve of their own, or have one already.
_APART = (*CURVES, *HISTOGRAMS, "step", "validation_loss", "tokens", "skipped", "step_seconds", "communication_seconds")
LONGEST = 10_000  # points of a curve that a checkpoint carries: more than any picture shows, less than 1 MB in all
_STEPS = 2**53  # no run comes so far


class Metrics:
    """Append to ``metrics.jsonl`` of a run's folder; on resume, drop what came after the resumed step.

    So no step stands there twice, however often a run was killed.
    """

    def __init__(self, folder: Path, last_step: int, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.path = folder / NAME
        self._file: TextIO = self._reopen(last_step, rows)

    def write(self, row: dict[str, Any]) -> None:
        """Append one object; a NaN is written as null, which JSON has."""
        self._file.write(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")
        self._file.flush()

    def rewind(self, last_step: int, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Drop the objects of all steps after ``last_step``; ``rows`` are those of the file, where they are known."""
        self._file.close()
        self._file = self._reopen(last_step, rows)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _reopen(self, last_step: int, rows: Sequence[Mapping[str, Any]] | None) -> TextIO:
        found = read(self.path) if rows is None else rows
        kept = [json.dumps(row) + "\n" for row in found if row["step"] <= last_step]
        if os.path.lexists(self.path):
            atomic.write_text(self.path, "".join(kept))
        return open(atomic.open_growing(self.path), "a", encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a metrics file, without a last line that a kill cut off; raises ``OSError``."""
    rows = []
    try:
        for line in read_lines(path):
            with suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict) and type(row.get("step")) is int and abs(row["step"]) < _STEPS:
                    rows.append(row)
    except FileNotFoundError:
        return []
    return rows


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Curves:
    """Curves of a run as plain lists, to be plotted from its checkpoint, and the sums of its histograms.

    Every number that is logged has a curve. One that is not in ``CURVES`` may be missing in some steps: those that it
    has are the curve ``NAME_step``. A name that ends so has none.

    A curve has at most ``LONGEST`` points: one that would be longer keeps the last of each of half as many stretches
    of steps. ``metrics.jsonl`` has them all.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Take a step's numbers."""
        for name in ("step", *CURVES):
            self.columns.setdefault(name, []).append(float(row.get(name, math.nan)))
        self._thin("step", *CURVES)
        if "validation_loss" in row:
            self.columns.setdefault("validation_step", []).append(float(row["step"]))
            self.columns.setdefault("validation_loss", []).append(float(row["validation_loss"]))
            self._thin("validation_step", "validation_loss")
        for name, value in row.items():
            if name not in _APART and not name.endswith("_step") and isinstance(value, (int, float)):
                self._add_sparse(name, float(row["step"]), float(value))
        for name in HISTOGRAMS:
            if name in row:
                _add_up(self.columns.setdefault(name, []), row[name])

    def _add_sparse(self, name: str, step: float, value: float) -> None:
        """Take a number that need not be there in every step; its steps are a curve of their own."""
        self.columns.setdefault(f"{name}_step", []).append(step)
        self.columns.setdefault(name, []).append(value)
        self._thin(f"{name}_step", name)

    def _thin(self, by: str, *others: str) -> None:
        """Drop points where there are too many; what stays follows from the points alone, so a resumed run agrees."""
        steps = self.columns[by]
        if len(steps) <= LONGEST:
            return
        first, stretches = steps[0], LONGEST // 2
        width = (steps[-1] - first) / stretches or 1.0
        last = {min(int((step - first) / width), stretches - 1): index for index, step in enumerate(steps)}
        for name in (by, *others):
            if len(self.columns[name]) == len(steps):  # a curve that an older file lacks began later: it stays
                self.columns[name] = [self.columns[name][index] for index in last.values()]


def _add_up(total: list[float], counts: Sequence[float]) -> None:
    total.extend([0.0] * (len(counts) - len(total)))
    for place, count in enumerate(counts):
        total[place] += count
