"""Statistics, provenance and output of results, shared by all benchmarks."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def guarded(run: Callable[[], object]) -> int:
    """Run a benchmark on this rank; report errors in the input, and return the exit code."""
    from hpctrain.cli.main import report
    from hpctrain.errors import HpctrainError
    from hpctrain.train.exit import in_world

    try:
        run()
    except HpctrainError as error:
        if not error.everywhere and in_world():
            raise  # one rank of several failed: the guard ends the job
        return report(error)
    return 0


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles and range of repeated timings, in seconds."""
    ordered = sorted(seconds)
    low, _, high = statistics.quantiles(ordered, n=4)
    return {
        "median": statistics.median(ordered),
        "quartile_1": low,
        "quartile_3": high,
        "min": ordered[0],
        "max": ordered[-1],
        "repeats": len(ordered),
    }


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of the slowest rank, per repeat."""
    return [max(times) for times in zip(*per_rank)]


def provenance(ranks: int, mpi: str) -> dict[str, Any]:
    """Return the provenance of a result: date, machine, software and command."""
    import torch

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["mpiexec", "-n", str(ranks), "python", *sys.argv]),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "changed": bool(_output("git", "status", "--porcelain", "--", "hpctrain", "benchmarks/*.py")),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "mpi": mpi,
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
    }


def mpi_name() -> str:
    """Return name and version of the MPI library."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def mpi_slug() -> str:
    """Return the name of the MPI library as part of a file name: mpich, openmpi."""
    from mpi4py import MPI

    return re.sub("[^a-z0-9]", "", MPI.get_vendor()[0].lower())


def write(name: str, content: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write a result as JSON into the results folder; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns; the first one is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def milliseconds(times: Mapping[str, float]) -> list[str]:
    """Return median, quartiles and minimum of a summary as text, in milliseconds."""
    return [f"{times[name] * 1e3:.1f}" for name in ("median", "quartile_1", "quartile_3", "min")]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    return done.stdout.strip()
