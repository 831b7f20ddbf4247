"""Facts of some runs for a report, from the files in their folders: state, receipt, curves, settings, trace."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.settings import flatten
from hpctrain.train import metrics
from hpctrain.train.profile.read import NAME as TRACE
from hpctrain.train.profile.read import TracedStep, TraceTimes, read, read_times
from hpctrain.train.receipt.read import RunReceipt, load
from hpctrain.train.receipt.write import maybe
from hpctrain.util.reading import read_text
from hpctrain.util.text import printable
from hpctrain.watch.curves import Curve, curves_of_rows
from hpctrain.watch.rows import MetricsFile, Row
from hpctrain.watch.state import RunState, read_state

CONFIG = "config.toml"  # the settings of a run
MOST_RUNS = 1000
_POINTS = 25_000  # of all curves in a page
_LEAST, POINTS = 20, 500  # points of a curve in a page, at least; points that are read
# Facts of an attempt that describe its environment, in the order in which they are shown.
ENVIRONMENT = tuple(
    "hpctrain python torch numpy h5py mpi4py launcher scheduler host user nodes size cpus gpus device parallel batch "
    "start_from start_step".split()
)


@dataclass(frozen=True)
class ReportedRun:
    """Facts of one run; ``notes`` says what is missing and why."""

    name: str  # differs from those of the other runs
    state: RunState
    receipt: RunReceipt
    rows: tuple[Row, ...]  # of the metrics, at even distances
    curves: Mapping[str, Curve]
    settings: Mapping[str, str]  # by dotted name
    environments: tuple[Mapping[str, str], ...]  # of each attempt
    step: TracedStep | None = None
    times: TraceTimes | None = None
    notes: tuple[str, ...] = ()


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Return the facts of runs. Raises ``UsageError`` if a folder is no run, or there are too many."""
    if len(folders) > MOST_RUNS:
        raise UsageError(f"{len(folders)} runs: a report shows at most {MOST_RUNS}; name fewer")
    states = [read_state(folder) for folder in folders]
    try:
        receipts = load(folders)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    return [_read(name, state, receipt) for name, state, receipt in zip(names_of(folders), states, receipts)]


def readable(folders: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the folders of runs that can be read, and why others cannot. Raises ``UsageError`` if none can."""
    found, reasons = [], []
    for folder in folders:
        try:
            read_state(folder)
            found.append(folder)
        except UsageError as error:
            if len(folders) == 1:
                raise
            reasons.append(str(error))
    if not found:
        raise UsageError(f"no run can be read: {reasons[0]}")
    return found, reasons


def drawn_points(runs: Sequence[ReportedRun]) -> int:
    """Return how many points of each curve a page of these runs has room for."""
    curves = sum(len(run.curves) for run in runs)
    return min(max(_POINTS // max(curves, 1), _LEAST), POINTS)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a name of each run: its path, without the folders that all of them are in."""
    if len(folders) == 1:
        return [printable(folders[0].name or folders[0])]
    above = os.path.commonpath([folder.absolute().parent for folder in folders])
    return [printable(folder.absolute().relative_to(above)) for folder in folders]


def _read(name: str, state: RunState, receipt: RunReceipt) -> ReportedRun:
    folder, notes = state.folder, []
    rows: list[Row] = []
    try:
        with MetricsFile.opened(folder / metrics.NAME) as file:
            rare, rows = file.rare(POINTS), file.sampled(POINTS)
    except OSError as error:
        notes.append(f"{folder / metrics.NAME} cannot be read ({error.strerror}): no curves")
        rare = []
    by_step = {row["step"]: row for row in (*rare, *rows)}
    settings, missing = _settings(folder / CONFIG)
    step = times = None
    if (folder / TRACE).exists():
        try:
            step, times = read(folder), read_times(folder)
        except UsageError as error:
            notes.append(str(error))
    return ReportedRun(
        name=name,
        state=state,
        receipt=receipt,
        rows=tuple(rows),
        curves=curves_of_rows([by_step[number] for number in sorted(by_step)]),
        settings=settings,
        environments=tuple(_environment(attempt) for attempt in state.attempts),
        step=step,
        times=times,
        notes=(*notes, *missing),
    )


def _settings(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the settings of a run, and a note if they cannot be read; a program's run may have none."""
    try:
        return {name: printable(value) for name, value in flatten(tomllib.loads(read_text(path))).items()}, []
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        return {}, [f"{path} cannot be read: {error.strerror}"]
    except (ValueError, RecursionError):
        return {}, [f"{path} is no TOML file: settings are not shown"]


def _environment(attempt: Mapping[str, Any]) -> dict[str, str]:
    return {name: printable(attempt[name]) for name in ENVIRONMENT if attempt.get(name) is not None}


# Comparisons ----------------------------------------------------------------------------------------------------------


def differences(facts: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the names whose values are not the same in all, with the value in each; empty text where it is absent."""
    names = list(dict.fromkeys(name for each in facts for name in each))
    found = {name: [each.get(name, "") for each in facts] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def work_per_second(run: ReportedRun) -> tuple[float, str] | None:
    """Return tokens, samples or steps per second: what a step contains, divided by the median time of a step.

    Only rows of the last start count. Evaluations and checkpoints between steps do not.
    """
    begun = maybe(run.state.attempt, "unix_time") or 0.0
    rows = [row for row in run.rows if (maybe(row, "unix_time") or 0.0) >= begun and maybe(row, "step_seconds")]
    if len(rows) < 2:
        return None
    seconds = median([float(row["step_seconds"]) for row in rows])
    steps = rows[-1]["step"] - rows[0]["step"]
    for name in ("tokens", "samples"):
        first, last = maybe(rows[0], name), maybe(rows[-1], name)
        if first is not None and last is not None and last > first and steps > 0:
            return (last - first) / steps / seconds, name
    batch = maybe(run.state.attempt, "batch")
    return (batch / seconds, "samples") if batch else (1 / seconds, "steps")


@dataclass(frozen=True)
class ScalingPoint:
    """Runs with one number of ranks: the median of their rates, compared with the smallest number."""

    ranks: int
    runs: int
    rate: float
    speedup: float
    efficiency: float  # 1: as fast per rank as with the smallest number of ranks


def scaling(runs: Sequence[ReportedRun]) -> tuple[list[ScalingPoint], str]:
    """Return the points of runs with different numbers of ranks, by ranks, and the unit of their rates.

    No points if all have the same number, or count different things.
    """
    rates: dict[int, list[float]] = {}
    units = set()
    for run in runs:
        measured, size = work_per_second(run), maybe(run.state.attempt, "size")
        if measured is not None and size:
            rates.setdefault(int(size), []).append(measured[0])
            units.add(measured[1])
    if len(rates) < 2 or len(units) != 1:
        return [], ""
    least = min(rates)
    reference = median(rates[least])
    points = []
    for ranks in sorted(rates):
        rate = median(rates[ranks])
        speedup = rate / reference
        points.append(ScalingPoint(ranks, len(rates[ranks]), rate, speedup, speedup * least / ranks))
    return points, units.pop()
