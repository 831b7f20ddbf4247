"""A job that is told to save does, comes back, and ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import re

import pytest
from batch_jobs import Desk
from support.paced_runs import EVERY, STEPS

pytestmark = pytest.mark.slurm
PACE = "0.2"  # so that 300 steps take a minute: the first attempt never gets through, the second is not paced


@pytest.mark.limit(400)
def test_the_time_is_over(desk: Desk, reference: dict[str, bytes]) -> None:
    # Slurm looks at the limit twice a minute, and sends the signal up to a minute early.
    job = desk.submit("--set", "run.margin=5", time="00:02:00", margin=59, PACE="0.25")
    assert job.until_over(225) == "COMPLETED"
    assert job.how_attempts_ended == [("stopped", "a signal"), ("finished", None)]
    assert job.restarts == 1
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference


@pytest.mark.limit(260)
def test_a_signal_by_hand(desk: Desk, reference: dict[str, bytes]) -> None:
    job = desk.submit(PACE=PACE)
    job.until_step(5)
    desk.slurm.command("scancel", "--batch", "--signal=USR1", job.id)
    assert job.until_over(120) == "COMPLETED"
    assert job.how_attempts_ended == [("stopped", "a signal"), ("finished", None)]
    # srun ends the others as soon as one rank has left: none may die of that, 75 is the exit code of all.
    assert set(re.findall(r"tasks? [\d,-]+: (.*)", job.output)) == {"Exited with exit code 75"}
    assert job.attempts[0]["step"] % EVERY, "it saved because of the signal, not because a checkpoint was due"
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference


@pytest.mark.limit(180)
def test_a_cancelled_job_saves_and_does_not_come_back(desk: Desk) -> None:
    job = desk.submit(PACE=PACE)
    job.until_step(5)
    desk.slurm.command("scancel", job.id)
    assert job.until_over(45) == "CANCELLED"
    job.until(lambda: "saved after step" in job.output, "its checkpoint", 30)
    assert job.how_attempts_ended == [("stopped", "a signal")]
    step = job.attempts[0]["step"]
    assert step % EVERY and (job.folder / f"checkpoints/step_{step:08}.h5").exists()
    assert job.restarts == 0
