"""Forecasts for runs that have been made, to compare them with what the runs needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import HpctrainError, SettingsError, UsageError
from hpctrain.forecast.memory import memory_of
from hpctrain.forecast.run import Device, PlannedRun, facts_of
from hpctrain.settings import check_code
from hpctrain.train.config import LOSSES, Settings, load
from hpctrain.train.receipt.read import Attempt
from hpctrain.train.run_folder import CONFIG


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
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(f"{path} does not exist: only runs of hpctrain train have settings to forecast from")
    try:
        settings = load(path)
        if functions := _functions_in(settings):
            raise UsageError(f"setting {next(iter(functions))} names a function, which is not called")
        per_node = -(-attempt.ranks // max(attempt.nodes, 1))
        memory = memory_of(PlannedRun(settings, facts_of(settings), attempt.ranks, per_node, device))
    except HpctrainError as error:
        raise UsageError(f"no forecast for {folder}: {error}") from error
    on_gpu = device == "cuda"
    return MemoryComparison(
        memory.node.host_total,
        attempt.peak_node_bytes,
        memory.rank.device_total if on_gpu else None,
        attempt.peak_device_bytes if on_gpu else None,
    )


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
        "model.factory": settings.model.factory,
        "optimizer.factory": settings.optimizer.factory,
        "train.loss": None if settings.train.loss in LOSSES else settings.train.loss,
    }
    return {setting: path for setting, path in named.items() if path is not None}
