"""Requeued jobs: a signal saves a checkpoint, the job starts again and ends with the bits of an uninterrupted run."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from batch_jobs import Job, Submitter
from support.paced_runs import EVERY, STEPS

pytestmark = pytest.mark.slurm
PACE = "0.2"  # seconds per step: 300 steps take a minute, so the first attempt never finishes; the second is not paced


@pytest.mark.limit(400)
def test_a_job_at_its_time_limit_saves_and_resumes(submitter: Submitter, reference: dict[str, bytes]) -> None:
    # Slurm checks the limit twice per minute, and sends the signal up to a minute early.
    job = submitter.submit("--set", "run.margin=5", time="00:02:00", margin=59, PACE="0.25")
    assert job.until_over(225) == "COMPLETED"
    assert job.how_attempts_ended == [("stopped", "a signal"), ("finished", None)]
    assert job.restarts == 1
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference


@pytest.mark.limit(260)
def test_a_signal_from_the_user_saves_and_requeues(submitter: Submitter, reference: dict[str, bytes]) -> None:
    job = submitter.submit(PACE=PACE)
    job.until_step(5)
    submitter.slurm.command("scancel", "--batch", "--signal=USR1", job.id)
    assert job.until_over(120) == "COMPLETED"
    assert job.how_attempts_ended == [("stopped", "a signal"), ("finished", None)]
    # srun ends the other ranks as soon as one rank has exited: none may die of that, all must exit with code 75.
    assert set(re.findall(r"tasks? [\d,-]+: (.*)", job.output)) == {"Exited with exit code 75"}
    assert job.attempts[0]["step"] % EVERY, "it saved because of the signal, not because a checkpoint was due"
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference


@pytest.mark.limit(180)
def test_a_cancelled_job_saves_and_is_not_requeued(submitter: Submitter) -> None:
    """Meanwhile it is watched from outside of the job."""
    job = submitter.submit(PACE=PACE)
    job.until_step(5)
    shown = watched(submitter, job)
    assert shown["status"] == "running" and 5 <= shown["step"] < shown["target"] == STEPS
    assert shown["attempt"]["scheduler"] == "slurm" and shown["attempt"]["job_id"] == job.id
    assert shown["left"] > 0 and shown["job_left"] > 0
    submitter.slurm.command("scancel", job.id)
    assert job.until_over(45) == "CANCELLED"
    job.until(lambda: "saved after step" in job.output, "its checkpoint", 30)
    assert job.how_attempts_ended == [("stopped", "a signal")]
    step = job.attempts[0]["step"]
    assert step % EVERY and (job.folder / f"checkpoints/step_{step:08}.h5").exists()
    assert job.restarts == 0
    assert watched(submitter, job)["status"] == "stopped"
    submitter.hpctrain("report", str(job.folder), "-o", str(submitter.folder / "page.html"))
    assert "stopped" in (submitter.folder / "page.html").read_text()


def watched(submitter: Submitter, job: Job) -> dict[str, Any]:
    """Return what ``hpctrain watch`` tells about the run of a job."""
    (state,) = json.loads(submitter.hpctrain("watch", str(job.folder), "--json"))
    return dict(state)
