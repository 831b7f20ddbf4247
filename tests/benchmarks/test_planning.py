"""Benchmark of forecasts of step times."""

from __future__ import annotations

import json
from pathlib import Path

import planning
import pytest
from support.jobs import JobStarter

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "planning.py"


@pytest.mark.benchmark
@pytest.mark.limit(400)
def test_forecasts_are_compared_with_runs(launch: JobStarter, tmp_path: Path) -> None:
    kept = {"gpt zero1 on 2", "convnet ddp on 1"}
    without = ",".join(case.name for case in planning.CASES if case.name not in kept)
    options = ("--quick", "--steps", "6", "--rounds", "1", "--without", without, "--out", tmp_path)
    done = launch(0, PROGRAM, *options, timeout=300)
    assert done.returncode == 0, done
    found = json.loads((tmp_path / "planning.json").read_text())
    assert set(found["cases"]) == kept and found["quick"] is True
    for one in found["cases"].values():
        assert one["measured"]["repeats"] == 2 and one["forecast"]["seconds"] > 0
        assert one["ratio"] == pytest.approx(one["forecast"]["seconds"] / one["measured"]["median"])
    assert "forecast / median" in done.stdout
