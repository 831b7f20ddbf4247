"""Runs and machines with round numbers, for tests of forecasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpctrain.forecast.machine import LinkModel, MachineRates
from hpctrain.forecast.run import ModelFacts, PlannedRun, facts_of
from hpctrain.forecast.time_layers import LayerTimer, recomputed_layers
from hpctrain.forecast.time_step import Forecast
from hpctrain.forecast.time_work import ModelWork, count
from hpctrain.models.settings import ModelSettings
from hpctrain.settings import build
from hpctrain.train.config import Settings

GPU = MachineRates(
    name="round",
    source="a test",
    kind="cuda",
    cores=1,
    flops={1: 1e12},
    bandwidth={1: 1e11},
    op_overhead=0.0,
    sync=0.0,
    oversubscribed_sync=0.0,
    intra_node=LinkModel(1e-6, 1e10),
    inter_node=LinkModel(1e-5, 1e9),
    disk=1e8,
    peak=2e12,
)
CPU = replace(
    GPU,
    kind="cpu",
    cores=4,
    flops={1: 1e10, 4: 3e10},
    bandwidth={1: 1e9, 4: 2e9},
    sync=1e-5,
    oversubscribed_sync=1e-3,
    peak=0.0,
)


def settings(batch: int = 16, model: str = "gpt-tiny", **parallel: Any) -> Settings:
    """Return settings of a small GPT with no data."""
    tree = {"train": {"batch": batch}, "parallel": parallel, "run": {"folder": "runs/none"}}
    return replace(build(Settings, tree), model=ModelSettings(name=model))


def planned(
    ranks: int, batch: int = 16, *, nodes: int = 1, facts: ModelFacts | None = None, **parallel: Any
) -> PlannedRun:
    """Return a run of a small GPT on a machine with GPUs."""
    chosen = settings(batch, **parallel)
    return PlannedRun(chosen, facts or facts_of(chosen), ranks, ranks // nodes, "cuda")


def forecast(run: PlannedRun, machine: MachineRates = GPU, works: Mapping[int, ModelWork] | None = None) -> Forecast:
    """Return the forecast of a run by the rates of a machine; ``works`` by number of tensor ranks, if known."""
    found = dict(works or {})
    for tensor in (1, run.parallel.tensor):
        if tensor not in found:
            parallel = replace(run.parallel, tensor=tensor, sequence=run.parallel.sequence and tensor > 1)
            found[tensor] = count(run.facts, "cross_entropy", None, parallel)
    timer = LayerTimer(machine, found[1], found[run.parallel.tensor], None, recomputed_layers(run.facts, run))
    return Forecast(machine, timer)
