"""Sweeps as PBS job arrays: each task trains by itself and continues as a job of its own."""

from __future__ import annotations

import tomllib

import pytest
from pbs_jobs import PbsJob, PbsSubmitter
from support.paced_runs import STEPS

pytestmark = pytest.mark.pbs


@pytest.mark.limit(240)
def test_one_task_of_a_sweep_continues_as_its_own_job(submitter: PbsSubmitter) -> None:
    sweep = submitter.submit("--sweep", "train.seed=1,2", PACE="0.1")
    first, second = (
        PbsJob(submitter.cluster, sweep.id.replace("[]", f"[{task}]"), sweep.script, sweep.folder / str(task))
        for task in range(2)
    )
    second.until_step(5)
    second.remind()
    second.until_link(1)
    for task, job in enumerate((first, second)):
        assert job.until_over(120) == 0
        assert tomllib.loads((job.folder / "config.toml").read_text())["train"]["seed"] == task + 1
        assert job.steps == list(range(1, STEPS + 1))
    assert first.how_attempts_ended == [("finished", None)] and first.links == [first.id]
    assert second.how_attempts_ended == [("stopped", "a signal"), ("finished", None)]
    # The array's folder records the array; a task's folder records the jobs that continue it.
    (again,) = second.links
    assert "[" not in again and [attempt["job_id"] for attempt in second.attempts] == [second.id, again]
    assert first.weights["model/head.weight"] != second.weights["model/head.weight"]
