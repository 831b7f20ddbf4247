"""Chains with failures of every kind end with the bits of an uninterrupted run (make test-pbs-long)."""

from __future__ import annotations

import pytest
from pbs_jobs import PbsJob, PbsSubmitter
from support.paced_runs import STEPS

pytestmark = [pytest.mark.pbs, pytest.mark.long]
EVERY = 10  # steps between checkpoints
PACE = "0.25"


@pytest.mark.limit(600)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_chain_with_failures_equals_one_run(
    lone_submitter: PbsSubmitter, reference: dict[str, bytes], mpi: str, nodes: int
) -> None:
    """Failures: qdel and resubmission; a killed rank and the next job of the chain; a killed mom; a dead node."""
    cluster = lone_submitter.cluster
    asked = ("--set", f"checkpoint.every={EVERY}", "--ranks-per-node", str(2 // nodes))
    paced = {"PACE": PACE, "PACE_AGAIN": "1"}
    job = lone_submitter.submit(*asked, nodes=nodes, mpi=mpi, **paced)
    job.until_step(EVERY + 5)
    cluster.login(f"qdel {job.id}")
    job.until(lambda: job.facts.get("job_state") == "F", "the end by qdel", 60)
    assert job.how_attempts_ended == [("stopped", "a signal")]

    job = lone_submitter.submit(*asked, nodes=nodes, mpi=mpi, HARM="kill 1 5", **paced)
    chain = len(job.links)  # jobs.json also lists the deleted job
    job.until_link(chain + 1, 90)
    _until_next(job, 5)

    # The job's first node loses its mom: PBS restarts the job elsewhere, while the old ranks still run. If their
    # launcher notices first, the attempt ends by itself, and the next job of the chain starts instead.
    (first, *_), starts = job.nodes, job.starts
    cluster.kill_mom(first)
    job.until(lambda: job.starts > starts and first not in job.nodes, "a start elsewhere", 150)
    _until_next(job, 5)
    cluster.start_mom(first)
    job.until(lambda: len(cluster.free_nodes()) == 3, f"{first} back", 60)

    (first, *_), starts = job.nodes, job.starts
    cluster.kill_node(first)
    job.until(lambda: job.starts > starts and first not in job.nodes, "a start elsewhere", 150)
    job.hurry()
    # An attempt that has lost its mom may have submitted a next job, in addition to PBS's own restart: the lock lets
    # only one of them train.
    job.until(lambda: all(cluster.job(link).get("job_state") == "F" for link in job.links), "the end of all", 150)
    assert 0 in [cluster.job(link).get("Exit_status") for link in job.links]
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference


def _until_next(job: PbsJob, steps: int) -> None:
    """Wait until the newest attempt has completed ``steps`` steps."""
    job.until(lambda: len(job.attempts) >= job.starts, "a new attempt", 90)
    job.until_step(job.attempts[-1]["first_step"] + steps)
