"""Output of a benchmark: tables, and result files as JSON and CSV with their provenance."""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.stats import Times, spreads

from hpctrain.util.atomic import write_text
from hpctrain.util.probe import output_of, python
from hpctrain.util.text import columns

RESULTS = Path(__file__).resolve().parents[1] / "results"
COLUMNS = ("group", "candidate", "size", "median", "low", "high", "repeats")
STEP = ("median ms", "quartile 1", "quartile 3", "min")
_ASK_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor())"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows as aligned columns; the first ``left`` columns are left-aligned."""
    return "\n".join(columns(rows, right=range(left, max(map(len, rows)))))


def milliseconds(times: Mapping[str, float]) -> list[str]:
    """Return median, quartiles and minimum of a summary as text, in milliseconds: the columns ``STEP``."""
    return [f"{times[name] * 1e3:.1f}" for name in ("median", "quartile_1", "quartile_3", "min")]


def step_table(head: str, times: Times, more: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Return a row per candidate: its times in milliseconds, and ``more`` columns by their titles and candidates."""
    more = more or {}
    rows = [[head, *STEP, *more]]
    rows += [
        [name, *milliseconds(time), *(cells.get(name, "") for cells in more.values())] for name, time in times.items()
    ]
    return table(rows) + "\n"


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """Return which candidates could not take part, and why."""
    return [f"left out: {name}: {why}" for name, why in left_out.items()]


def write_result(folder: Path, name: str, content: Mapping[str, Any], rows: Iterable[Sequence[Any]] = ()) -> list[Path]:
    """Write a result as JSON, and its spreads and other ``rows`` as CSV; return the files."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *spreads(content), *rows])
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.json", folder / f"{name}.csv"]
    write_text(files[0], json.dumps(content, indent=2) + "\n")
    write_text(files[1], text.getvalue())
    return files


def provenance(ranks: int, *, launched: bool) -> dict[str, Any]:
    """Return the provenance of a result: date, machine, software and command; ``launched`` by ``mpiexec``."""
    import torch

    from hpctrain.train.calibration import processor

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([*(["mpiexec", "-n", str(ranks)] if launched else []), "python", *sys.argv]),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--", "hpctrain", "benchmarks/*.py")),
        "machine": socket.gethostname(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "mpi": mpi_name(),
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
    }


def mpi_name() -> str:
    """Return name and version of the MPI library, without starting MPI; empty if there is none."""
    module = sys.modules.get("mpi4py.MPI")
    vendor = str(module.get_vendor()) if module else output_of(python("-c", _ASK_MPI), timeout=60)
    found = re.search(r"\('(.*)', \((\d+), (\d+), (\d+)\)\)", vendor)
    return f"{found[1]} {'.'.join(found.groups()[1:])}" if found else ""


def mpi_slug() -> str:
    """Return the name of the MPI library as part of a file name: mpich, openmpi."""
    return re.sub("[^a-z]", "", mpi_name().lower())


def _git(*words: str) -> str:
    return output_of(["git", "-C", str(RESULTS.parents[1]), *words]).strip()
