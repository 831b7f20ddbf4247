"""Failures under Slurm: a dead rank or node ends the job within seconds; it is requeued unless it makes no progress."""

from __future__ import annotations

import pytest
from batch_jobs import Submitter
from support.pace import scaled
from support.paced_runs import STEPS

pytestmark = pytest.mark.slurm
SOON = 10.0  # seconds from the failure until no rank is left
# The surviving ranks may write the reason before they are killed, or may not.
ENDS = [("killed", "failed"), ("finished",)]
BOTH = pytest.mark.parametrize("mpi", ["mpich", "openmpi"])


@BOTH
@pytest.mark.limit(260)
def test_a_job_with_a_killed_rank_is_requeued(submitter: Submitter, reference: dict[str, bytes], mpi: str) -> None:
    job = submitter.submit("--set", "checkpoint.every=20", mpi=mpi, HARM="kill 1 30")
    job.until(lambda: (submitter.folder / "harm.txt").exists(), "harm", 90)
    seconds = job.until_away() - submitter.harmed
    assert seconds < scaled(SOON)
    assert job.until_over(120) == "COMPLETED"
    assert [attempt["status"] in outcomes for attempt, outcomes in zip(job.attempts, ENDS, strict=True)] == [True, True]
    assert (job.restarts, job.attempts[1]["first_step"]) == (1, 21)
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference


@BOTH
@pytest.mark.limit(180)
def test_an_exception_of_one_rank_ends_the_job_with_one_traceback(submitter: Submitter, mpi: str) -> None:
    job = submitter.submit("--restarts", "0", mpi=mpi, HARM="raise 1 30")
    job.until(lambda: (submitter.folder / "harm.txt").exists(), "harm", 90)
    seconds = job.until_away() - submitter.harmed
    assert seconds < scaled(SOON)
    assert job.until_over(30) == "FAILED" and job.exit_code not in (0, 75)
    assert job.output.count("Traceback") == 1
    assert job.output.count("rank 1 of 2 on a2 in step 30 ends the job: RuntimeError: harm was asked for") == 1


@pytest.mark.limit(260)
def test_a_crash_loop_is_stopped(submitter: Submitter) -> None:
    job = submitter.submit("--retries", "1", HARM="raise 1 5", HARM_AGAIN="1")
    assert job.until_over(150) == "FAILED"
    assert (job.exit_code, job.restarts) == (1, 1)
    assert f"job {job.id} has started 2 times from nothing and got no further" in job.output
    assert not list(job.folder.glob("checkpoints/*.h5"))


@pytest.mark.limit(300)
def test_a_job_with_a_dead_node_is_requeued_on_other_nodes(submitter: Submitter, reference: dict[str, bytes]) -> None:
    job = submitter.submit("--set", "checkpoint.every=10", PACE="0.2")
    job.until_step(15)
    before = submitter.slurm.job(job.id)
    submitter.slurm.kill_node(before["BatchHost"])
    assert job.until_over(150) == "COMPLETED"
    after = submitter.slurm.job(job.id)
    assert before["NodeList"] == "a[1-2]" and after["NodeList"] == "a[2-3]"
    assert [attempt["status"] in outcomes for attempt, outcomes in zip(job.attempts, ENDS, strict=True)] == [True, True]
    assert job.attempts[1]["first_step"] in range(11, 100)
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference
