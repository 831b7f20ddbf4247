"""Reports of the time of a run, and the recommended strategy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.forecasts import CPU, planned

from hpctrain.errors import UsageError
from hpctrain.forecast import time_forecasts
from hpctrain.forecast.candidates import MemoryLimits, candidates
from hpctrain.forecast.report import ForecastOption, TimeReport, as_option, recommend, time_report
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


def test_the_fastest_candidate_that_fits_is_recommended_with_its_reason() -> None:
    ddp, zero1 = planned(4), planned(4, data="zero1")
    slow = planned(4, data="zero1", recompute=True)
    found = recommend(
        [
            ForecastOption("ddp", False, ddp, 51 * GIB, 40 * GIB),
            ForecastOption("zero1", True, zero1, 12.3 * GIB, 40 * GIB),
            ForecastOption("zero1 + recompute", True, slow, 8 * GIB, 40 * GIB),
        ],
        Forecasts(ddp, "H100"),
    )
    assert found.name == "zero1" and set(found.seconds) == {"zero1", "zero1 + recompute"}
    assert found.reason.startswith("zero1 fits in 12.30 GiB of 40.00 GiB and is the fastest of 2 that fit: ")
    assert found.reason.endswith("; ddp would need 51.00 GiB") and "zero1 + recompute" in found.reason
    assert found.seconds["zero1"] < found.seconds["zero1 + recompute"]


def test_the_smallest_candidate_is_named_if_none_fits() -> None:
    one = planned(2)
    found = recommend(
        [ForecastOption("ddp", False, one, 9 * GIB, 4 * GIB), ForecastOption("fsdp", False, one, 5 * GIB, 4 * GIB)]
    )
    assert found.name is None and found.reason == "none of 2 fits: fsdp needs least, 5.00 GiB of 4.00 GiB"
    with pytest.raises(UsageError, match="no configuration can"):
        recommend([])
    only = recommend([ForecastOption("ddp", True, one)], Forecasts(one, "H100"))
    assert only.name == "ddp" and only.reason.startswith("ddp is the only configuration: ")


def test_a_candidate_is_described_by_its_scarcest_memory() -> None:
    found = candidates(planned(2), MemoryLimits(device=10**9, host=10**12))
    one, *_ = map(as_option, found)
    memory = found[0].memory
    assert (one.needs, one.limit) == (memory.rank.device_total, 10**9) and one.fits and one.name == "ddp"
    assert as_option(replace(found[0], limits=MemoryLimits())).limit == 0
    report = time_report(found[0].run, "H200", found[:3])
    assert report.advice is not None and report.advice.name in {way.name for way in found}
    assert any(line.startswith("recommended: ") for line in report.lines())


def test_forecasts_need_no_mpi() -> None:
    program = (
        "import sys; import hpctrain.forecast.report, hpctrain.forecast.time_forecasts as f; f.calibration(); "
        "sys.exit('mpi4py.MPI' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
