"""A sweep is a job array: each task trains for itself, with its own settings, and comes back by itself."""

from __future__ import annotations

import tomllib

import pytest
from batch_jobs import Desk, Job
from support.paced_runs import STEPS

pytestmark = pytest.mark.slurm


@pytest.mark.limit(240)
def test_a_sweep_of_three(desk: Desk) -> None:
    sweep = desk.submit("--sweep", "train.seed=1,2,3", nodes=1, PACE="0.05")
    tasks = [Job(desk.slurm, f"{sweep.id}_{number}", sweep.script, sweep.folder / str(number)) for number in range(3)]
    tasks[1].until_step(5)
    desk.slurm.command("scancel", "--batch", "--signal=USR1", tasks[1].id)
    ended = [("finished", None)]
    for number, task in enumerate(tasks):
        assert task.until_over() == "COMPLETED"
        assert tomllib.loads((task.folder / "config.toml").read_text())["train"]["seed"] == number + 1
        assert task.how_attempts_ended == ([("stopped", "a signal")] if number == 1 else []) + ended
        assert task.steps == list(range(1, STEPS + 1))
    assert len({task.weights["model/head.weight"] for task in tasks}) == 3
