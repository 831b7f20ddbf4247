"""Forecasts for runs that have been made, compared with what the runs needed; corrections that follow from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError, SettingsError, UsageError
from hpctrain.forecast.memory import Memory, memory_of
from hpctrain.forecast.run import Device, PlannedRun, facts_of
from hpctrain.forecast.scaling import RunTime
from hpctrain.settings import check_code
from hpctrain.train import metrics
from hpctrain.train.config import LOSSES, Settings, load
from hpctrain.train.receipt import read as receipts
from hpctrain.train.receipt.read import Attempt
from hpctrain.train.receipt.write import NAME, maybe, read_receipt
from hpctrain.train.run_folder import CONFIG
from hpctrain.util.text import counted, format_bytes, format_seconds

MOST_RUNS = 3  # earlier runs to compare with: a forecast takes seconds
_FEWEST = 10  # steps of a run whose step time counts


@dataclass(frozen=True)
class MemoryComparison:
    """Peak memory of a run in bytes, as forecast from its settings and as measured; None for what is unknown."""

    node_forecast: int
    node_measured: int | None
    device_forecast: int | None
    device_measured: int | None


def compare_memory(folder: Path, attempt: Attempt, device: Device) -> MemoryComparison:
    """Return forecast and measurement of a start of a run. Raises ``UsageError`` if there is no forecast for it.

    The forecast runs no code that the settings name.
    """
    memory = memory_of(planned_again(folder, attempt, device))
    on_gpu = device == "cuda"
    return MemoryComparison(
        memory.node.host_total,
        attempt.peak_node_bytes,
        memory.rank.device_total if on_gpu else None,
        attempt.peak_device_bytes if on_gpu else None,
    )


def planned_again(folder: Path, attempt: Attempt, device: Device) -> PlannedRun:
    """Return the run of a folder as it would be planned today. Raises ``UsageError`` if it cannot be."""
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(f"{path} does not exist: only runs of hpctrain train have settings to forecast from")
    try:
        settings = load(path)
        if functions := _functions_in(settings):
            raise UsageError(f"setting {next(iter(functions))} names a function, which is not called")
        per_node = -(-attempt.ranks // max(attempt.nodes, 1))
        return PlannedRun(settings, facts_of(settings), attempt.ranks, per_node, device)
    except HpctrainError as error:
        raise UsageError(f"no forecast for {folder}: {error}") from error


# Earlier runs of the same site ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experience:
    """Measurements of earlier runs, divided by their forecasts; empty if nothing was measured."""

    folders: tuple[Path, ...] = ()
    memory: tuple[float, ...] = ()  # of a node, for GPUs of a GPU
    time: tuple[float, ...] = ()  # of a step

    @property
    def memory_factor(self) -> float:
        return statistics.median(self.memory) if self.memory else 1.0

    @property
    def time_factor(self) -> float:
        return statistics.median(self.time) if self.time else 1.0

    def corrected(self, memory: Memory, device: Device) -> int:
        """Return the bytes of a node, or for GPUs of a GPU, that the run will need."""
        total = memory.rank.device_total if device == "cuda" else memory.node.host_total
        return round(total * self.memory_factor)

    def corrected_time(self, whole: RunTime) -> RunTime:
        """Return the time of the whole run; what is no computation of steps stays as forecast."""
        return replace(whole, steps=whole.steps * self.time_factor, evaluations=whole.evaluations * self.time_factor)

    def lines(self, memory: Memory, device: Device, step: float, whole: RunTime) -> list[str]:
        """Return sentences on the errors of earlier forecasts, and the corrected forecast; none without runs."""
        if not self.folders:
            return []
        found, fixed = [], []
        if self.memory:
            found.append(f"memory {_range(self.memory)}")
            where = "GPU" if device == "cuda" else "node"
            fixed.append(f"{format_bytes(self.corrected(memory, device), 2)} per {where}")
        if self.time:
            found.append(f"a step {_range(self.time)}")
            fixed.append(f"{format_seconds(step * self.time_factor)} per step")
            fixed.append(f"walltime to request {self.corrected_time(whole).walltime}")
        runs = counted(len(self.folders), "earlier run")
        names = ", ".join(str(folder) for folder in self.folders)
        return [f"{runs} needed, of the forecast: {'; '.join(found)} ({names})", f"corrected: {', '.join(fixed)}"]

    def as_dict(self, memory: Memory, device: Device, step: float, whole: RunTime) -> dict[str, Any] | None:
        """Return the same as plain values."""
        if not self.folders:
            return None
        return {
            "runs": [str(folder) for folder in self.folders],
            "memory_ratios": list(self.memory),
            "step_ratios": list(self.time),
            "corrected": {
                "device_bytes" if device == "cuda" else "node_bytes": self.corrected(memory, device),
                "step_seconds": step * self.time_factor,
                "walltime": self.corrected_time(whole).walltime,
            },
        }


def _range(ratios: Sequence[float]) -> str:
    low, high = min(ratios), max(ratios)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def learn(folder: Path, device: Device, step_seconds: Callable[[PlannedRun], float]) -> Experience:
    """Return how far forecasts were off for the newest runs in a folder of runs, on this kind of device.

    ``step_seconds`` forecasts the time of a step. Runs without settings or measurements are left out.
    """
    folders = [one for one in receipts.runs_in(folder) if (one / NAME).is_file()]
    ratios: list[tuple[Path, float | None, float | None]] = []
    for one in sorted(folders, key=lambda one: (one / NAME).stat().st_mtime, reverse=True):
        if len(ratios) == MOST_RUNS:
            break
        try:
            memory, time = _ratios(one, device, step_seconds)
        except (HpctrainError, OSError):
            continue
        if memory is not None or time is not None:
            ratios.append((one, memory, time))
    memories = [memory for _, memory, _ in ratios if memory is not None]
    times = [time for _, _, time in ratios if time is not None]
    return Experience(tuple(one for one, _, _ in ratios), tuple(memories), tuple(times))


def _ratios(
    folder: Path, device: Device, step_seconds: Callable[[PlannedRun], float]
) -> tuple[float | None, float | None]:
    """Return measured by forecast memory, and the same of the time of a step; None for what is unknown."""
    facts = list(read_receipt(folder).get("attempts", ()))
    if not facts:
        return None, None
    (receipt,) = receipts.load([folder], {})
    last = receipt.attempts[-1]
    ran_on = "cuda" if str(facts[-1].get("device", "cpu")).startswith("cuda") else "cpu"
    seconds = _median_step(folder, last)
    if ran_on != device or (last.peak_node_bytes is None and seconds is None):
        return None, None
    run = planned_again(folder, last, device)
    memory = memory_of(run)
    measured = last.peak_device_bytes if device == "cuda" else last.peak_node_bytes
    forecast = memory.rank.device_total if device == "cuda" else memory.node.host_total
    return (
        measured / forecast if measured and forecast else None,
        seconds / step_seconds(run) if seconds else None,
    )


def _median_step(folder: Path, attempt: Attempt) -> float | None:
    """Return the median seconds of a step of a start; None if it has made few steps."""
    rows = [row for row in metrics.read(folder / metrics.NAME) if attempt.first_step <= row["step"]]
    seconds = [found for row in rows if (found := maybe(row, "step_seconds"))]
    return statistics.median(seconds) if len(seconds) >= _FEWEST else None


# Functions in settings ------------------------------------------------------------------------------------------------


def check_functions(settings: Settings) -> None:
    """Raise ``SettingsError`` if the settings name external code, which planning would run."""
    for setting, path in _functions_in(settings).items():
        check_code(path, setting)
        # torch.load and torch.hub.load run the code that their arguments name.
        if path.startswith(("torch.", "torch:")) and not path.startswith(("torch.nn", "torch.optim")):
            raise SettingsError(f"{setting} {path} is a function of torch: read the config, then add --allow-code")


def _functions_in(settings: Settings) -> dict[str, str]:
    """Return the functions that the settings name, by setting."""
    named = {
        "model.factory": settings.model.factory if settings.model.pretrained is None else None,  # no code of the user
        "optimizer.factory": settings.optimizer.factory,
        "train.loss": None if settings.train.loss in LOSSES else settings.train.loss,
    }
    return {setting: path for setting, path in named.items() if path is not None}
