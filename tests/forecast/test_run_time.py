"""Time of a whole run, and the walltime to request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.forecasts import GPU, forecast, planned

from hpctrain.forecast.scaling import MARGIN, START, run_time, walltime


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
