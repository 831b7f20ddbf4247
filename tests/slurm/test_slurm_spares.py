"""Spare nodes under Slurm: a dead node is replaced within the allocation; if the script's node dies, Slurm requeues."""

from __future__ import annotations

import pytest
from batch_jobs import Submitter
from support.paced_runs import STEPS

from hpctrain.train.receipt.read import load
from hpctrain.train.receipt.render import text

pytestmark = pytest.mark.slurm
WORDS = ("--nodes", "2", "--spares", "1", "--set", "checkpoint.every=10")


@pytest.mark.limit(260)
@pytest.mark.parametrize("mpi, launcher", [("mpich", "srun"), ("openmpi", "openmpi"), ("mpich", "hydra")])
def test_a_dead_node_is_replaced_by_a_spare_one(
    submitter: Submitter, reference: dict[str, bytes], mpi: str, launcher: str
) -> None:
    job = submitter.submit(*WORDS, mpi=mpi, profile={"launcher": launcher}, PACE="0.2")
    job.until_step(15)
    assert submitter.slurm.job(job.id)["NumNodes"] == "3"
    submitter.slurm.kill_node("a2")
    (submitter.folder / "hurry").touch()
    assert job.until_over(150) == "COMPLETED"
    assert job.restarts == 0 and f"job {job.id} starts again on a1 a3 (exit code" in job.output
    first, second = job.attempts
    assert (first["spare_nodes"], second.get("spare_nodes")) == (1, None)
    assert (first["nodes"], second["nodes"]) == (2, 2) and second["first_step"] in range(11, 100)
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference
    receipts = load([job.folder], {})
    lines = text(receipts)
    assert "2 + 1 spare" in " ".join(lines[3].split()) and any("spare nodes" in line for line in lines)


@pytest.mark.limit(300)
def test_a_job_whose_script_has_lost_its_node_is_requeued(submitter: Submitter, reference: dict[str, bytes]) -> None:
    job = submitter.submit(*WORDS, PACE="0.2")
    job.until_step(15)
    host = submitter.slurm.job(job.id)["BatchHost"]
    submitter.slurm.kill_node(host)
    job.until(lambda: job.restarts == 1, "its requeue", 100)
    submitter.slurm.start_node(host)
    assert job.until_over(150) == "COMPLETED"
    assert [attempt["nodes"] for attempt in job.attempts] == [2, 2]
    assert job.steps == list(range(1, STEPS + 1))
    assert job.weights == reference
