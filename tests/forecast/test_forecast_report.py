"""Reports of the time of a run, and the recommended strategy."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.forecasts import CPU, planned

from hpctrain.errors import UsageError
from hpctrain.forecast import time_forecasts
from hpctrain.forecast.candidates import Configuration, MemoryLimits, candidates
from hpctrain.forecast.memory import Memory, Need
from hpctrain.forecast.report import TimeReport, recommend, time_report
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.time_forecasts import Forecasts
from hpctrain.util.text import format_seconds

GIB = 2**30


@pytest.fixture(scope="module")
def report() -> TimeReport:
    return time_report(planned(2), "a100")


def test_a_report_has_rates_walltime_and_assumptions(report: TimeReport, tmp_path: Path) -> None:
    text = "\n".join(report.lines())
    rates = r"[\d,.]+ samples/s, [\d,.e+]+ tokens/s, \S+ TFLOP/s, \d+% of the peak"
    assert re.search(rf"a step takes \S+ \w+: {rates}", text)
    assert re.search(r"walltime to request: \d\d:\d\d:00 ", text) and "10,000" in text
    assert "A100, data sheet of A100" in text and "60% of 19.5 TFLOP/s" in text
    report.draw(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").exists()


def test_a_range_shows_the_spread_of_repetitions(report: TimeReport) -> None:
    apart = replace(report, spread=(0.5, 2.0))
    low, high = (format_seconds(factor * report.step.seconds) for factor in (0.5, 2.0))
    assert f" ({low} to {high}): " in apart.lines()[0] and " to " not in report.lines()[0].split(":")[0]
    seconds = apart.as_dict()["step"]["range_seconds"]
    assert seconds == pytest.approx([0.5 * report.step.seconds, 2 * report.step.seconds])


def test_a_report_converts_to_json(report: TimeReport) -> None:
    found = json.loads(json.dumps(report.as_dict()))
    assert found["step"]["seconds"] == pytest.approx(sum(found["step"]["parts"].values()))
    assert found["run"]["walltime"] == report.whole.walltime and len(found["scaling"]) == 15
    assert found["step"]["share_of_peak"] == report.step.share_of_peak


def test_layers_are_timed_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_forecasts, "probe", lambda dtype, folder: CPU)
    monkeypatch.setattr(time_forecasts, "calibration", dict)
    found = time_report(replace(planned(1, 2), device="cpu"))
    assert any("timed here" in line for line in found.assumptions)
    assert found.step.parts["forward"] > 0 and found.step.share_of_peak is None


def test_an_unnamed_gpu_is_an_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    machine, here = time_forecasts.machine_for(planned(1))
    assert machine.name == "A100" and not here and "no GPU is visible here" in machine.assumed[0]
    with pytest.raises(UsageError, match="no GPU is visible to measure: name the machine"):
        time_forecasts.machine_for(planned(1), "this")


def option(name: str, run: PlannedRun, needs: float, limit: int | None = None) -> Configuration:
    """Return a configuration whose ranks need this many GiB of a GPU's memory."""
    need = Need({"parameters": int(needs * GIB)}, {}, "")
    return Configuration(name, run, Memory((need,), need, ((),)), MemoryLimits(limit and limit * GIB))


def test_the_fastest_candidate_that_fits_is_recommended_with_its_reason() -> None:
    ddp, zero1 = planned(4), planned(4, data="zero1")
    slow = planned(4, data="zero1", recompute=True)
    found = recommend(
        [option("ddp", ddp, 51, 40), option("zero1", zero1, 12.3, 40), option("zero1 + recompute", slow, 8, 40)],
        Forecasts(ddp, "H100"),
    )
    assert found.name == "zero1" and set(found.seconds) == {"zero1", "zero1 + recompute"}
    assert found.reason.startswith("zero1 fits in 12.30 GiB of 40.00 GiB and is the fastest of 2 that fit: ")
    assert found.reason.endswith("; ddp would need 51.00 GiB") and "zero1 + recompute" in found.reason
    assert found.seconds["zero1"] < found.seconds["zero1 + recompute"]


def test_the_smallest_candidate_is_named_if_none_fits() -> None:
    one = planned(2)
    forecasts = Forecasts(one, "H100")
    found = recommend([option("ddp", one, 9, 4), option("fsdp", one, 5, 4)], forecasts)
    assert found.name is None and found.reason == "none of 2 fits: fsdp needs least, 5.00 GiB of 4.00 GiB"
    only = recommend([option("ddp", one, 9)], forecasts)
    assert only.name == "ddp" and only.reason.startswith("ddp is the only configuration: ")


def test_a_candidate_is_described_by_its_scarcest_memory() -> None:
    found = candidates(planned(2), MemoryLimits(device=10**9, host=10**12))
    one = found[0]
    assert one.scarcest == (one.memory.rank.device_total, 10**9) and one.fits and one.name == "ddp"
    assert replace(one, limits=MemoryLimits(10**12, 10**9)).scarcest == (one.memory.node.host_total, 10**9)
    assert replace(one, limits=MemoryLimits()).scarcest == (0, 0)
    report = time_report(one.run, "H200", found[:3])
    assert report.advice is not None and report.advice.name in {way.name for way in found}
    assert any(line.startswith("recommended: ") for line in report.lines())
