"""A sweep is a job array: each task trains for itself, and comes back as a job of its own."""

from __future__ import annotations

import tomllib

import pytest
from pbs_jobs import PbsDesk, PbsJob
from support.paced_runs import STEPS

pytestmark = pytest.mark.pbs


@pytest.mark.limit(240)
def test_a_sweep_of_two(desk: PbsDesk) -> None:
    sweep = desk.submit("--sweep", "train.seed=1,2", PACE="0.1")
    first, second = (
        PbsJob(desk.cluster, sweep.id.replace("[]", f"[{task}]"), sweep.script, sweep.folder / str(task))
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
    # The array's folder names the array; that of a task names the jobs that go on from it.
    (again,) = second.links
    assert "[" not in again and [attempt["job_id"] for attempt in second.attempts] == [second.id, again]
    assert first.weights["model/head.weight"] != second.weights["model/head.weight"]
