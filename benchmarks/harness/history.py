"""Earlier runs of each benchmark: a line per run with its figures and where it was measured, in ``history/NAME.jsonl``.

A single run says little on a machine that others use too. So what is claimed is the range of
several runs, and only runs of one model of processor are put together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.stats import spreads

from hpctrain.util import atomic
from hpctrain.util.reading import read_text

FOLDER = "history"  # next to the newest results
_KEPT = ("date", "commit", "changed", "processor", "cores", "load_before")
Key = tuple[str, str, str]  # group, candidate, size


@dataclass(frozen=True)
class Figure:
    """Figure of one run: median of the repeats, the ends of their spread, and the minimum, in seconds."""

    median: float
    low: float
    high: float
    least: float

    @property
    def spread(self) -> float:
        """Return the width of the spread, relative to the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Run:
    """A benchmark that was run once: where and when, and its figures."""

    provenance: Mapping[str, Any]
    figures: Mapping[Key, Figure]

    @property
    def processor(self) -> str:
        return str(self.provenance.get("processor") or "unknown processor")

    @property
    def day(self) -> str:
        return str(self.provenance.get("date", ""))[:10]


def line_of(content: Mapping[str, Any]) -> str:
    """Return the line of a result."""
    kept = {key: content["provenance"][key] for key in _KEPT if key in content["provenance"]}
    rows = [
        [group, name, size, *(_short(median if value == "" else value) for value in (median, low, high, least))]
        for group, name, size, median, low, high, _, least, _ in spreads(content)
    ]
    return json.dumps({**kept, "figures": rows}, separators=(",", ":"))


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def record(folder: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Add a result to the runs of its benchmark; return their file."""
    path = folder / FOLDER / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = atomic.open_growing(path)
    try:
        atomic.append_line(handle, line_of(content))
    finally:
        os.close(handle)
    return path


def runs_of(folder: Path, name: str) -> Iterator[Run]:
    """Yield the runs of a benchmark, in the order in which they were measured; none without a file."""
    path = folder / FOLDER / f"{name}.jsonl"
    for line in read_text(path).splitlines() if path.exists() else ():
        found = json.loads(line)
        rows = {
            (group, candidate, str(size)): Figure(*times) for group, candidate, size, *times in found.pop("figures")
        }
        yield Run(found, rows)
