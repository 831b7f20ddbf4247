"""Benchmark of memory forecasts."""

from __future__ import annotations

import json
from pathlib import Path

import forecast
import pytest
from forecast import CASES, MODELS, Rank
from support.jobs import JobStarter

from hpctrain.forecast.memory import CATEGORIES, Memory, Need

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "forecast.py"


@pytest.mark.benchmark
@pytest.mark.limit(400)
def test_forecasts_are_compared_with_runs(launch: JobStarter, tmp_path: Path) -> None:
    done = launch(0, PROGRAM, "--only", "embedding fsdp on 2", "--out", tmp_path, timeout=300)
    assert done.returncode == 0, done
    found = json.loads((tmp_path / "forecast.json").read_text())
    (one,) = found["cases"].values()
    assert len(one["ranks"]) == 2 and one["measured"] == sum(rank["private"] + rank["shared"] for rank in one["ranks"])
    assert one["ratio"] == pytest.approx(one["measured"] / sum(one["forecast"].values()))
    assert "without program" in done.stdout


def test_ten_models_have_a_case_for_each_strategy_that_supports_them() -> None:
    assert len(MODELS) == 10 == len({model.name for model in MODELS})
    for model in MODELS:
        strategies = {case.strategy for case in CASES if case.model is model}
        assert strategies == {"ddp", "fsdp", "offload", *(("1f1b", "zb-h1") if model.is_row else ())}


def test_ratios_are_measured_over_forecast() -> None:
    host = {**dict.fromkeys(CATEGORIES, 0), "parameters": 100, "program": 300}
    need = Need(dict.fromkeys(CATEGORIES, 0), host, "")
    found = forecast.Outcome(CASES[0], Memory((need,), need, (("",),)), [Rank(290, 410, 40)])
    assert (found.measured, found.node) == (450, 400)
    assert found.ratio == 450 / 400 and found.ratio_of_model == 150 / 100
