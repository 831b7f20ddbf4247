"""Sweeps as job arrays: each task trains with its own settings and is requeued independently."""

from __future__ import annotations

import tomllib

import pytest
from batch_jobs import Job, Submitter
from support.paced_runs import STEPS

pytestmark = pytest.mark.slurm


@pytest.mark.limit(240)
def test_one_task_of_a_sweep_is_requeued_alone(submitter: Submitter) -> None:
    sweep = submitter.submit("--sweep", "train.seed=1,2,3", nodes=1, PACE="0.05")
    tasks = [
        Job(submitter.slurm, f"{sweep.id}_{number}", sweep.script, sweep.folder / str(number)) for number in range(3)
    ]
    tasks[1].until_step(5)
    submitter.slurm.command("scancel", "--batch", "--signal=USR1", tasks[1].id)
    ended = [("finished", None)]
    for number, task in enumerate(tasks):
        assert task.until_over() == "COMPLETED"
        assert tomllib.loads((task.folder / "config.toml").read_text())["train"]["seed"] == number + 1
        assert task.how_attempts_ended == ([("stopped", "a signal")] if number == 1 else []) + ended
        assert task.steps == list(range(1, STEPS + 1))
    assert len({task.weights["model/head.weight"] for task in tasks}) == 3
