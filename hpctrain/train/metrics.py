"""Write what happened, one JSON object a step, and keep the curves for the checkpoint."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

NAME = "metrics.jsonl"
CURVES = ("loss", "learning_rate", "grad_norm")


class Metrics:
    """Append to ``metrics.jsonl`` of a run's folder; on resume, drop what came after the resumed step.

    So no step stands there twice, however often a run was killed.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self.path = folder / NAME
        self._file: TextIO = self._reopen(last_step)

    def write(self, row: dict[str, Any]) -> None:
        """Append one object; a NaN is written as null, which JSON has."""
        self._file.write(json.dumps({key: _finite(value) for key, value in row.items()}) + "\n")
        self._file.flush()

    def rewind(self, last_step: int) -> None:
        """Drop the objects of all steps after ``last_step``."""
        self._file.close()
        self._file = self._reopen(last_step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _reopen(self, last_step: int) -> TextIO:
        kept = [json.dumps(row) + "\n" for row in read(self.path) if row["step"] <= last_step]
        if self.path.exists():
            temporary = self.path.with_name(f".{NAME}.tmp-{os.getpid()}")
            temporary.write_text("".join(kept))
            temporary.replace(self.path)
        return self.path.open("a")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a metrics file; a last line that a kill cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Curves:
    """Hold the curves of a run as plain lists, to be plotted from its checkpoint."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Take a step's numbers."""
        for name in ("step", *CURVES):
            self.columns.setdefault(name, []).append(float(row.get(name, math.nan)))
        if "validation_loss" in row:
            self.columns.setdefault("validation_step", []).append(float(row["step"]))
            self.columns.setdefault("validation_loss", []).append(float(row["validation_loss"]))
