"""Jobs with a range of nodes: every start takes what is free, and the receipt has what was granted."""

from __future__ import annotations

import pytest
from batch_jobs import Submitter
from private_slurm import PrivateSlurm
from support.paced_runs import STEPS

from hpctrain.train.receipt.read import load
from hpctrain.train.receipt.render import text

pytestmark = pytest.mark.slurm


def hold_node(slurm: PrivateSlurm, name: str) -> str:
    """Occupy a whole node by another job, and return its id."""
    words = ["sbatch", "--parsable", "--exclusive", f"--nodelist={name}", "--output=/dev/null", "--wrap=sleep 600"]
    job_id = slurm.command(*words).strip()
    slurm.until(lambda: slurm.job(job_id)["JobState"] == "RUNNING", f"a job on {name}", 30)
    return job_id


@pytest.mark.limit(260)
@pytest.mark.parametrize("mpi, launcher", [("mpich", "srun"), ("openmpi", "srun"), ("mpich", "hydra")])
def test_a_start_gets_the_nodes_that_are_free(submitter: Submitter, mpi: str, launcher: str) -> None:
    held = hold_node(submitter.slurm, "a1")
    words = ["--nodes", "2-3", "--set", "train.batch=12"]
    job = submitter.submit(*words, mpi=mpi, profile={"launcher": launcher}, PACE="0.2")
    job.until_step(5)
    # The second start finds three free nodes, although the first one had two.
    submitter.slurm.command("scancel", held)
    submitter.slurm.command("scancel", "--batch", "--signal=USR1", job.id)
    assert job.until_over(120) == "COMPLETED"
    found = [(one["nodes"], one["size"], one["requested_nodes"]) for one in job.attempts]
    assert found == [(2, 2, "2-3"), (3, 3, "2-3")]
    assert "has 2 of 2-3 nodes: 2 ranks" in job.output and "has 3 of 2-3 nodes: 3 ranks" in job.output
    assert job.steps == list(range(1, STEPS + 1))
    receipts = load([job.folder], {})
    assert [line.split()[4:7] for line in text(receipts)[3:5]] == [["2", "of", "2-3"], ["3", "of", "2-3"]]


@pytest.mark.limit(260)
def test_a_restart_runs_on_fewer_nodes(submitter: Submitter) -> None:
    """The negative: with --ntasks-per-node, Slurm lets the restart wait for as many nodes as the first start had."""
    job = submitter.submit("--nodes", "2-3", "--set", "train.batch=12", PACE="0.2")
    job.until_step(5)
    words = ["sbatch", "--parsable", "--exclusive", "--nodelist=a1", "--output=/dev/null", "--wrap=sleep 600"]
    submitter.slurm.command(*words)  # waits for a1, and gets it before the job has been requeued
    submitter.slurm.command("scancel", "--batch", "--signal=USR1", job.id)
    assert job.until_over(120) == "COMPLETED"
    assert [(one["nodes"], one["requested_nodes"]) for one in job.attempts] == [(3, "2-3"), (2, "2-3")]
    assert job.steps == list(range(1, STEPS + 1))


@pytest.mark.limit(120)
def test_slurm_grants_one_node_per_task(submitter: Submitter) -> None:
    """Scripts therefore request cores, and hpctrain job check reports the first case."""
    slurm, granted = submitter.slurm, []
    for words in (["--ntasks-per-node=1"], ["--ntasks-per-node=2"], ["--mincpus=1"]):
        command = ["sbatch", "--parsable", "--nodes=2-3", *words, "--output=/dev/null", "--wrap=true"]
        job_id = slurm.command(*command).strip()
        slurm.until(lambda: slurm.job(job_id)["JobState"] == "COMPLETED", f"the end of job {job_id}", 30)
        granted.append(slurm.job(job_id)["NumNodes"])
    assert granted == ["2", "3", "3"]
