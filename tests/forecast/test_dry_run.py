"""Timing of real forward and backward passes in as many processes as a node has ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cpu_burner import BURN
from support.forecasts import CPU
from support.pace import scaled

from hpctrain.data.dataset import write_arrays
from hpctrain.forecast import dry_run
from hpctrain.forecast.dry_run import DryRunTimes, time_dry_run
from hpctrain.forecast.run import PlannedRun, facts_of
from hpctrain.forecast.time_forecasts import Forecasts
from hpctrain.train.config import Settings, load


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    tests = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
    for name, value in {"WARM": 1, "LEAST": 2, "MOST": 2}.items():
        monkeypatch.setattr(dry_run, name, value)

    def plan(ranks: int, **options: Any) -> PlannedRun:
        settings = burning(tmp_path, **options)
        return PlannedRun(settings, facts_of(settings), ranks, ranks)

    return plan


def burning(folder: Path, **options: Any) -> Settings:
    pair = np.ones((48, 4), dtype=np.float32), np.zeros(48, dtype=np.int64)
    write_arrays(folder / "data.h5", train=pair, validation=pair)
    config = folder / "run.toml"
    told = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    config.write_text(f"""data.files = ["{folder}/data.h5"]
data.format = "arrays"
model.factory = "support.cpu_burner:Burning"
model.options = {{{told}}}
train.batch = 48
""")
    return load(config)


def test_processes_that_share_cores_take_longer(plan: Any) -> None:
    """Three processes that each use a core share the existing cores: timing one process alone would not show it."""
    cores = len(os.sched_getaffinity(0))
    found = time_dry_run(plan(3, message="not an answer"), 1, 0.0, deadline=scaled(60))
    assert found is not None and (found.ranks, found.threads) == (3, 1)
    assert found.forward >= BURN * max(1.0, 0.9 * 3 / cores) and 0 < found.backward


def test_passes_that_exceed_the_limits_are_not_run(plan: Any, capfd: pytest.CaptureFixture[str]) -> None:
    run = plan(2, fails=True)
    large = replace(run.settings, train=replace(run.settings.train, batch=2**31))
    assert time_dry_run(run, 1, dry_run.MOST_SECONDS * 1.01) is None
    assert time_dry_run(plan(16, fails=True), 1, 0.0) is None
    assert time_dry_run(replace(run, settings=large), 1, 0.0) is None  # more than the free memory
    assert "this model fails" not in capfd.readouterr().err, "a process was started"


def test_a_failing_process_falls_back_to_the_timed_layers(plan: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert time_dry_run(plan(1, fails=True), 1, 0.0) is None
    assert "this model fails" in capfd.readouterr().err


def test_no_process_outlives_the_deadline(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(dry_run.subprocess, "Popen", Noted)
    assert time_dry_run(plan(2), 1, 0.0, deadline=0.05) is None
    assert len(started) == 2 and all(one.returncode == -signal.SIGKILL for one in started)


def test_a_forecast_uses_the_timed_passes(plan: Any) -> None:
    told: list[tuple[int, int, float]] = []

    def rehearsed(run: PlannedRun, threads: int, expected: float) -> DryRunTimes:
        told.append((run.ranks, threads, expected))
        return DryRunTimes(0.25, 0.5, run.ranks, threads, (0.75, 1.5))

    run = plan(2)
    forecasts = Forecasts(run, here=CPU, dry_run=rehearsed)
    step = forecasts.step(run)
    assert step.parts["forward"] == pytest.approx(0.25) and step.parts["backward"] == pytest.approx(0.5)
    assert forecasts.spread() == (0.75, 1.5)
    forecasts.step(run)
    assert len(told) == 1 and told[0][2] > BURN
    assert any("by 2 processes at once" in line for line in forecasts.assumptions(run))


def test_no_passes_are_timed_on_a_busy_machine(plan: Any) -> None:
    run = plan(1)
    forecasts = Forecasts(run, here=replace(CPU, busy=True), dry_run=lambda *args: pytest.fail("others are running"))
    assert forecasts.step(run).parts["forward"] > 0
    assert "passes: the sum of their layers" in forecasts.assumptions(run)
