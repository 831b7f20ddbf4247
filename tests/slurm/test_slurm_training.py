"""Training on two nodes under every launcher; ``SBATCH_*`` variables have no effect; singletons are refused."""

from __future__ import annotations

import json

import pytest
from batch_jobs import Submitter

pytestmark = pytest.mark.slurm


@pytest.mark.limit(200)
@pytest.mark.parametrize(
    "mpi, launcher, started, kind",
    [
        ("mpich", "srun", "srun --mpi=pmi2", "slurm"),
        ("openmpi", "srun", "srun --mpi=pmix", "slurm"),
        ("openmpi", "openmpi", "mpirun -n 2", "openmpi"),
        ("mpich", "hydra", "mpiexec -n 2 -ppn 1", "hydra"),
    ],
)
def test_two_nodes_train_one_model(
    submitter: Submitter, reference: dict[str, bytes], mpi: str, launcher: str, started: str, kind: str
) -> None:
    job = submitter.submit(mpi=mpi, profile={"launcher": launcher})
    assert job.until_over() == "COMPLETED"
    assert started in job.script.read_text()
    (attempt,) = job.attempts
    assert {name: attempt[name] for name in ("size", "nodes", "launcher", "status")} == {
        "size": 2,
        "nodes": 2,
        "launcher": kind,
        "status": "finished",
    }
    assert job.weights == reference


@pytest.mark.limit(160)
def test_variables_of_the_caller_have_no_effect(submitter: Submitter) -> None:
    submitter.extra = {
        "SBATCH_PARTITION": "nowhere",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_JOB_NAME": "other",
        "SBATCH_SIGNAL": "KILL@10",
        "SBATCH_NO_REQUEUE": "1",
        "SLURM_NTASKS": "7",
        "SLURM_CPU_BIND": "nonsense",
        "PMI_RANK": "3",
    }
    job = submitter.submit("--directive=--comment=mine", nodes=1)
    facts = submitter.slurm.job(job.id)
    wanted = {"Partition": "main", "TimeLimit": "00:10:00", "JobName": "paced", "Requeue": "1", "NumTasks": "1"}
    assert {name: facts[name] for name in wanted} == wanted
    assert job.until_over() == "COMPLETED" and job.attempts[0]["size"] == 1
    noted = json.loads((job.folder / "jobs.json").read_text())
    assert noted["job_id"] == job.id and noted["scheduler"] == "slurm"
    assert noted["environment_removed"] == sorted(submitter.extra)
    # The negative: without the protection the variables take effect.
    refused = submitter.slurm.command("env", "SBATCH_PARTITION=nowhere", "sbatch", str(job.script), check=False)
    assert not refused.strip()


@pytest.mark.limit(200)
def test_singleton_ranks_are_refused(submitter: Submitter) -> None:
    cells = [("openmpi", "pmi2"), ("openmpi", "none"), ("mpich", "none"), ("mpich", "pmix")]
    jobs = [submitter.submit(mpi=mpi, profile={"mpi": kind}, run=f"{mpi}-{kind}") for mpi, kind in cells]
    for (mpi, kind), job in zip(cells, jobs):
        assert f"srun --mpi={kind} " in job.script.read_text()
        assert job.until_over() == "FAILED"
        # The job, too, exits with the code of bad input, although srun kills slower ranks; it is not requeued.
        assert (job.exit_code, job.restarts) == (2, 0)
        right = {"mpich": "pmi2", "openmpi": "pmix"}[mpi]
        assert job.output.count(f"start with srun --mpi={right} ") == 1, "said once, by one rank"
        assert not (job.folder / "run.json").exists()
