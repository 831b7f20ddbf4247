"""Inputs of forecasts, each computed once: the machine's rates, the model's work, the times of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm.tuning.table import RankLayout
from hpctrain.forecast.dry_run import DryRunTimes, time_dry_run
from hpctrain.forecast.machine import MachineRates, preset, probe, probe_gpu
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.time_layers import LayerFit, LayerTimer, dtype_of, one_thread, recomputed_layers, time_layers
from hpctrain.forecast.time_step import Forecast, StepTime
from hpctrain.forecast.time_work import ModelWork, count
from hpctrain.parallel.config import ParallelSettings
from hpctrain.train.calibration import Measurement, find, folder, mpi_name, path_of, this_machine

HERE = "this"  # name of this machine
ASSUMED_GPU = "A100"


class Forecasts:
    """Forecasts for runs that differ in their ranks and strategies, on one machine.

    ``here`` are the rates of this machine if they are known, ``dry_run`` times its passes.
    """

    def __init__(
        self,
        run: PlannedRun,
        name: str | None = None,
        *,
        here: MachineRates | None = None,
        dry_run: Callable[[PlannedRun, int, float], DryRunTimes | None] = time_dry_run,
    ) -> None:
        self.machine, self._here = machine_for(run, name) if here is None else (here, True)
        self.calibrated: Mapping[RankLayout, Measurement] = calibration() if self._here else {}
        self._first = run
        self._works: dict[Any, ModelWork] = {}
        self._measured: dict[Any, tuple[dict[int, LayerFit] | None, tuple[float, float]]] = {}
        self._time_dry_run = dry_run
        self._dry_run: DryRunTimes | None = None

    def of(self, run: PlannedRun) -> Forecast:
        """Return the forecast of a run; raises ``UsageError`` if its model cannot be split as configured."""
        parallel, dtype = run.parallel, dtype_of(run)
        whole = self._work(run, ParallelSettings())
        local = self._work(run, parallel) if parallel.tensor > 1 else whole
        timer = LayerTimer(self.machine, whole, local, None, recomputed_layers(run.facts, run))
        if self._here and self.machine.kind == "cpu":
            key = dtype, run.settings.train.loss
            if key not in self._measured:
                self._measured[key] = self._measure(timer, dtype)
            timed, ratio = self._measured[key]
            timer = replace(timer, timed=timed, dry_run_ratio=ratio)
        return Forecast(self.machine, timer, self.calibrated, self._first.ranks)

    def step(self, run: PlannedRun) -> StepTime:
        return self.of(run).step(run)

    def spread(self) -> tuple[float, float]:
        """Return the range of a step time, as multiples of its forecast, from the spread of the measurements."""
        if self._dry_run is not None:
            return self._dry_run.spread
        return (1.0, max(self.machine.slowest, 1.0))

    def assumptions(self, run: PlannedRun) -> list[str]:
        """Return the assumptions of a run's forecast, as sentences."""
        found = [f"rates: {self.machine.name}, {self.machine.source}"]
        timer = self.of(run).timer
        if timer.timed is not None:
            found.append("layers: one of each kind timed here on one thread, alone, at two numbers of samples")
            found.append(self._passes_note(timer))
        else:
            found.append("layers: operations and bytes counted, divided by the rates")
        if run.ranks > 1:
            measured = [one for layout, one in self.calibrated.items() if layout.size == run.ranks]
            source = "from the calibration" if measured else "by messages, bytes and passes over memory"
            loads = [one.load for one in measured if one.load is not None]  # of the machine at the calibration
            found.append(f"collectives: {source}" + (f", at a load of {max(loads):g} per core" if loads else ""))
        return [*found, *self.machine.assumed]

    def _work(self, run: PlannedRun, parallel: ParallelSettings) -> ModelWork:
        dtype, loss = dtype_of(run), run.settings.train.loss
        key = dtype, loss, parallel.tensor, parallel.tensor_plan, parallel.sequence
        if key not in self._works:
            self._works[key] = count(run.facts, loss, dtype, parallel)
        return self._works[key]

    def _measure(
        self, timer: LayerTimer, dtype: torch.dtype | None
    ) -> tuple[dict[int, LayerFit] | None, tuple[float, float]]:
        """Return the times of the layers here, and those of a dry run's passes relative to their sum; 1 without one."""
        run = self._first
        loss, single = run.settings.train.loss, one_thread(self.machine)
        timed = time_layers(run.facts, timer.whole, run.microbatch, single, loss, dtype)
        if timed is None or self.machine.busy:
            return timed, (1.0, 1.0)
        whole = replace(timer, local=timer.whole, timed=timed, recomputed=frozenset())
        layers = whole.layers(run, Forecast(self.machine, whole).network(run))
        forward, backward = sum(layer.forward for layer in layers), sum(layer.backward for layer in layers)
        one = self._time_dry_run(run, self.machine.rank_share(run.ranks_on_node).threads, forward + backward)
        if one is None:
            return timed, (1.0, 1.0)
        self._dry_run = one
        return timed, (one.forward / forward, one.backward / backward)

    def _passes_note(self, timer: LayerTimer) -> str:
        """Return as text how the times of the passes were obtained."""
        one, (forward, backward) = self._dry_run, timer.dry_run_ratio
        if one is None:
            return "passes: the sum of their layers"
        processes = f"{one.ranks} processes at once" if one.ranks > 1 else "a process"
        threads = f"{one.threads} thread{'s' if one.threads > 1 else ''}"
        return (
            f"passes: made here by {processes} of {threads}, which took {forward:.2f} (forward) and {backward:.2f} "
            "(backward) of the sum of their layers"
        )


def machine_for(run: PlannedRun, name: str | None = None) -> tuple[MachineRates, bool]:
    """Return the named machine, or the rates of this one, and whether it is this one.

    Raises ``UsageError`` if the name is unknown.
    """
    dtype = "bfloat16" if dtype_of(run) is torch.bfloat16 else "float32"
    where = Path(run.settings.run.folder)
    if name is not None and name != HERE:
        return preset(name, dtype), False
    if run.device == "cpu":
        return probe(dtype, where), True
    if name == HERE or torch.cuda.is_available():
        return probe_gpu(dtype, where), True
    found = preset(ASSUMED_GPU, dtype)
    why = f"no GPU is visible here and no machine was named: an {ASSUMED_GPU} is assumed"
    return replace(found, assumed=(why, *found.assumed)), False


def calibration() -> Mapping[RankLayout, Measurement]:
    """Return the calibrated collective times of machines like this one, by layout."""
    kept = folder()
    if kept is not None and not any(kept.glob("*.json")):
        return {}  # avoids asking MPI for its name
    machine = this_machine(mpi_name())
    found = find(machine) if path_of(machine) is not None else None
    return found.measurements if found is not None else {}
