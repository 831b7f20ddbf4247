"""Output of a benchmark: tables, targets of figures, and result files as JSON and CSV with their provenance."""

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.stats import Times, spreads

from hpctrain.util.atomic import write_text
from hpctrain.util.probe import output_of, python
from hpctrain.util.text import columns

RESULTS = Path(__file__).resolve().parents[1] / "results"
COLUMNS = ("group", "candidate", "size", "median", "low", "high", "repeats", "min", "mean")
STEP = ("median ms", "quartile 1", "quartile 3", "min")
_SMALL = 0.005  # smaller figures would show as zero with two decimals
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


# Targets --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Figure with its target, which is a minimum or a maximum."""

    what: str
    value: float
    target: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def wanted(self) -> str:
        """Return the target as text."""
        return f"{'>=' if self.at_least else '<='} {self.target:g}"


def at_least(what: str, value: float | None, target: float) -> Iterator[Target]:
    """Yield a figure with its minimum, if it was measured."""
    if value is not None:
        yield Target(what, value, target)


def at_most(what: str, value: float | None, target: float) -> Iterator[Target]:
    """Yield a figure with its maximum, if it was measured."""
    if value is not None:
        yield Target(what, value, target, at_least=False)


def target_table(found: Iterable[Target]) -> str:
    """Return the figures that have a target, and whether they reach it; empty if there are none."""
    rows = [[one.what, _figure(one.value), one.wanted, "reached" if one.met else "missed"] for one in found]
    return table([["target", "measured", "wanted", ""], *rows]) + "\n" if rows else ""


def targets_json(found: Iterable[Target]) -> list[dict[str, Any]]:
    return [{"what": one.what, "value": one.value, "wanted": one.wanted, "met": one.met} for one in found]


def _figure(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.1e}" if 0 < value < _SMALL else f"{value:.2f}"


# Files ----------------------------------------------------------------------------------------------------------------


def csv_text(content: Mapping[str, Any], rows: Iterable[Sequence[Any]] = ()) -> str:
    """Return the spreads of a result, and other ``rows``, as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *spreads(content), *rows])
    return text.getvalue()


def write_result(folder: Path, name: str, content: Mapping[str, Any], table: str) -> list[Path]:
    """Write a result as JSON, and its ``table`` as CSV; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.json", folder / f"{name}.csv"]
    write_text(files[0], json.dumps(content, indent=2) + "\n")
    write_text(files[1], table)
    return files


def provenance(ranks: int, *, launched: bool) -> dict[str, Any]:
    """Return the provenance of a result: date, machine, software and command; ``launched`` by ``mpiexec``."""
    import numpy as np
    import torch

    from hpctrain.cluster.resources import cpu_affinity, format_cpus
    from hpctrain.train.calibration import processor

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(sys.argv, ranks if launched else 0),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--", "hpctrain", "benchmarks/*.py")),
        "machine": socket.gethostname(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "host": host_kind(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "caches": caches(),
        "cpus_of_rank_0": format_cpus(cpu_affinity()),
        "load_before": LOAD_BEFORE,
        "load": _load(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "mpi4py": _version("mpi4py"),
        "hpctrain": _version("hpctrain"),
        "mpi_network": mpi_network(),
        "mpi": mpi_name(),
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
    }


def _load() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


LOAD_BEFORE = _load()  # when this program started


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def host_kind(root: Path = Path("/")) -> str:
    """Return the product that the firmware names, and whether it is a virtual machine."""
    names = [_line(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    flags = re.search(r"^flags\s*:.*\bhypervisor\b", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return ", ".join(filter(None, [" ".join(filter(None, names)), "virtual machine" if flags else ""]))


def caches(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[str, str]:
    """Return the sizes of the first core's caches: {"L1d": "32K", ...}."""
    found = {}
    for index in sorted(folder.glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_line(index / "type"), "")
        found[f"L{_line(index / 'level')}{kind}"] = _line(index / "size")
    return found


def _line(path: Path) -> str:
    return _text(path).strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def mpi_network(environ: Mapping[str, str] = os.environ) -> str:
    """Return what MPI sends with, as far as it tells: the device of MPICH, components that variables select."""
    module = sys.modules.get("mpi4py.MPI")
    said = re.search(r"Device:\s*(\S+)", str(module.Get_library_version())) if module else None
    chosen = ("FI_PROVIDER", "UCX_TLS", "OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_osc")
    return " ".join([*([said[1]] if said else []), *(f"{name}={environ[name]}" for name in chosen if name in environ)])


def mpi_name() -> str:
    """Return name and version of the MPI library, without starting MPI; empty if there is none."""
    module = sys.modules.get("mpi4py.MPI")
    vendor = str(module.get_vendor()) if module else output_of(python("-c", _ASK_MPI), timeout=60)
    found = re.search(r"\('(.*)', \((\d+), (\d+), (\d+)\)\)", vendor)
    return f"{found[1]} {'.'.join(found.groups()[1:])}" if found else ""


def mpi_slug() -> str:
    """Return the name of the MPI library as part of a file name: mpich, openmpi."""
    return re.sub("[^a-z]", "", mpi_name().lower())


def command(words: Sequence[str], ranks: int) -> str:
    """Return the command line of a program, under ``mpiexec`` if it has ranks; paths are those in the repository."""
    launcher = ["mpiexec", "-n", str(ranks)] if ranks else []
    return " ".join([*launcher, "python", *words]).replace(f"{RESULTS.parents[1]}{os.sep}", "")


def _git(*words: str) -> str:
    return output_of(["git", "-C", str(RESULTS.parents[1]), *words]).strip()
