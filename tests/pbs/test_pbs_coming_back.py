"""Chains of PBS jobs: qdel saves a checkpoint, and a chain ends with the bits of an uninterrupted run."""

from __future__ import annotations

import pytest
from pbs_jobs import PbsSubmitter
from support.paced_runs import EVERY, STEPS

pytestmark = pytest.mark.pbs
PACE = "0.2"  # seconds per step: 300 steps take a minute, so the signal to save arrives before the run finishes


@pytest.mark.parametrize(
    "mpi, nodes",
    [
        ("mpich", 2),
        ("openmpi", 2),
        pytest.param("openmpi", 1, marks=pytest.mark.long),
        pytest.param("mpich", 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.limit(180)
def test_qdel_saves_and_ends_the_chain(submitter: PbsSubmitter, mpi: str, nodes: int) -> None:
    job = submitter.submit("--ranks-per-node", str(2 // nodes), nodes=nodes, mpi=mpi, PACE=PACE)
    job.until_step(5)
    hosts = job.nodes
    submitter.cluster.login(f"qdel {job.id}")
    job.until_over(45)
    assert job.how_attempts_ended == [("stopped", "a signal")]
    step = job.attempts[0]["step"]
    assert step % EVERY and job.checkpoints == [step]
    assert job.links == [job.id]
    for host in hosts:
        job.until(lambda: not submitter.cluster.processes(host, job.id), f"no process left on {host}", 20)


@pytest.mark.limit(300)
def test_a_chain_of_three_jobs_equals_one_run(submitter: PbsSubmitter, reference: dict[str, bytes]) -> None:
    job = submitter.submit("--ranks-per-node", "2", PACE="0.1", PACE_AGAIN="1")
    waiting = submitter.submit("--after", job.id, "--template", "benchmark", run="after", time="00:01:00")
    for number in (1, 2):
        job.until_link(number)
        job.until_step(20 * number)
        assert waiting.facts["job_state"] == "H" and job.links[-1] in waiting.facts["depend"]
        job.remind()
        job.until_link(number + 1)
    job.hurry()
    assert job.until_over() == 0
    assert job.how_attempts_ended == [("stopped", "a signal")] * 2 + [("finished", None)]
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference
    # Every job of the chain is recorded, and all records name the same chain.
    assert [attempt["job_id"] for attempt in job.attempts] == job.links and job.links[0] == job.id
    assert [cluster_job["Exit_status"] for cluster_job in map(submitter.cluster.job, job.links)] == [75, 75, 0]
    noted = [line.split() for line in (job.folder / "starts.txt").read_text().splitlines()]
    assert [(chain, link) for chain, _, link in noted] == [(job.id, link) for link in job.links]
    waiting.until_over(90)
    assert waiting.facts["etime"] >= submitter.cluster.job(job.links[-1])["etime"]
