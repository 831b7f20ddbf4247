"""Scaling curves as numbers, text and figure; the time of a whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.forecasts import CPU, GPU, forecast, planned

from hpctrain.errors import UsageError
from hpctrain.forecast.machine import MachineRates
from hpctrain.forecast.plots import draw, scaling_figure
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.scaling import MARGIN, START, Curve, Point, busy, counts_for, lines, run_time, scale, walltime
from hpctrain.forecast.time_step import StepTime


class Rated:
    """Forecast by the rates of one machine, whose work is counted once."""

    def __init__(self, run: PlannedRun, machine: MachineRates = GPU) -> None:
        self.machine = machine
        self._works = {1: forecast(run).timer.whole}

    def step(self, run: PlannedRun) -> StepTime:
        return forecast(run, self.machine, self._works).step(run)


@pytest.fixture(scope="module")
def run() -> PlannedRun:
    return replace(planned(4, 64), ranks_per_node=4)


@pytest.fixture(scope="module")
def curve(run: PlannedRun) -> Curve:
    forecasts: Any = Rated(run)
    return scale(run, forecasts)


def test_a_curve_goes_from_one_rank_to_ten_thousand(curve: Curve) -> None:
    assert [point.ranks for point in curve.points] == [*(2**power for power in range(14)), 10_000]
    assert [point.ranks for point in curve.points if point.strong] == [1, 2, 4, 8, 16, 32, 64]
    assert all(point.weak is not None for point in curve.points)


def test_strong_scaling_shares_the_batch_and_weak_scaling_does_not(curve: Curve) -> None:
    for point in curve.points:
        if point.strong is not None:
            assert point.strong.samples == 64
        assert point.weak is not None and point.weak.samples == 16 * point.ranks
    planned_one = curve.points[2]
    assert planned_one.strong == planned_one.weak


def test_efficiency_is_relative_to_the_first_point_and_falls_between_nodes(curve: Curve) -> None:
    shares = [curve.efficiency(point, "weak") for point in curve.points]
    assert shares[0] == 1 and all(share is not None and 0 < share <= 1 for share in shares)
    first, eight = curve.points[0].weak, curve.points[3].weak
    assert first is not None and eight is not None
    assert shares[3] == pytest.approx(first.seconds / eight.seconds)
    assert (shares[3] or 0) < (shares[2] or 0)  # the fifth rank is on another node
    assert curve.efficiency(curve.points[-1], "strong") is None


def test_efficiency_is_at_most_one_if_more_ranks_use_cores_better(curve: Curve) -> None:
    """One rank with four threads, then four ranks with one thread each, which take half the time per sample."""
    one, two, four, *_ = (point.weak for point in curve.points)
    assert one is not None and two is not None and four is not None
    halved = replace(four, parts={name: seconds / 8 for name, seconds in four.parts.items()})
    found = Curve((Point(1, 4, None, one), Point(2, 4, None, None), Point(4, 4, None, halved)))
    rates = [step.samples_per_second / 4 for step in (one, halved)]
    assert rates[1] > rates[0]
    shares = [found.efficiency(point, "weak") for point in found.points]
    assert shares == [pytest.approx(rates[0] / rates[1]), None, 1.0]
    assert [row.split()[-1] for row in lines(found)[2:]] == [f"{shares[0]:.0%}", "-", "100%"]


def test_cpu_ranks_count_by_their_busy_cores(run: PlannedRun) -> None:
    assert [busy(run, ranks, CPU) for ranks in (1, 2, 3, 4, 5, 8)] == [4, 4, 3, 4, 8, 8]
    assert busy(run, 5, GPU) == 5


def test_rank_counts_are_whole_replicas_and_include_the_run() -> None:
    assert counts_for(planned(6, 24, pipe=3), 50) == [3, 6, 12, 24, 48]
    assert counts_for(planned(6, 24), 8) == [1, 2, 4, 6, 8]


def test_the_table_has_a_row_per_point_and_dashes_for_impossible_ones(curve: Curve) -> None:
    above, titles, *rows = lines(curve)
    assert len(rows) == 15 and "same batch" in above and titles.split()[:2] == ["ranks", "step"]
    assert rows[-1].split()[:4] == ["10,000", "-", "-", "-"] and rows[0].split()[-1] == "100%"
    assert curve.as_dict()[-1]["strong"] is None


def test_the_figure_shows_strong_weak_and_ideal_scaling(curve: Curve, run: PlannedRun, tmp_path: Path) -> None:
    rates, shares = scaling_figure(curve, run).axes
    drawn = {line.get_label(): list(line.get_xdata()) for line in rates.lines}
    assert {"same batch", "same samples per rank", "ideal"} <= drawn.keys()
    assert drawn["same batch"][-1] == 64 and drawn["same samples per rank"][-1] == 10_000
    assert len(shares.lines) == 2 and "gpt-tiny, ddp" in rates.get_title(loc="left")
    draw(curve, run, tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    with pytest.raises(UsageError, match="must end in .png, .svg, .pdf"):
        draw(curve, run, tmp_path / "curve.txt")
    with pytest.raises(UsageError, match="cannot write .*No such file"):
        draw(curve, run, tmp_path / "no" / "curve.svg")


# Time of a whole run, and the walltime to request ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds, expected",
    [
        (0.1, "00:01:00"),
        (60, "00:01:00"),
        (61, "00:02:00"),
        (3601, "01:05:00"),
        (7200, "02:00:00"),
        (360_000.5, "100:05:00"),
    ],
)
def test_walltimes_are_rounded_up(seconds: float, expected: str) -> None:
    assert walltime(seconds) == expected


def test_run_time_is_the_sum_of_start_steps_evaluations_and_checkpoints() -> None:
    run = planned(1)
    train = replace(run.settings.train, steps=1000, evaluate_every=100)
    saving = replace(run.settings.checkpoint, every=300)
    data = replace(run.settings.data, validation_samples=40)
    run = replace(run, settings=replace(run.settings, train=train, checkpoint=saving, data=data))
    step = forecast(run).step(run)
    found = run_time(run, step, GPU)
    assert found.checkpoint_bytes == 12 * run.facts.numel
    assert found.checkpoints == pytest.approx(4 * 12 * run.facts.numel / 1e8)  # at 300, 600, 900 and the end
    assert found.evaluations == pytest.approx(10 * 3 * step.parts["forward"])  # 40 samples are 3 batches of 16
    assert found.steps == pytest.approx(1000 * step.seconds) and found.start == START
    assert found.walltime == walltime(found.seconds * MARGIN)
    background = replace(run.settings, checkpoint=replace(saving, background=True))
    assert run_time(replace(run, settings=background), step, GPU).checkpoints < found.checkpoints / 3
