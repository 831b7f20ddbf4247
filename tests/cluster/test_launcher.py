"""Detection of launchers by the variables that they set; the environments below are copied from real ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hpctrain.cluster.launcher import Launch, detect, without_launcher
from hpctrain.errors import LaunchError

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
PALS = {
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "17",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
STEP = BATCH_SCRIPT | {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
# Environment of mpirun's daemons, which srun starts on each of two nodes; their ranks inherit it.
DAEMON = STEP | {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def launch_of(kind: Any, **facts: Any) -> Launch:
    known = dict(rank=3, size=4, local_rank=1, local_size=2, job_id=None, scheduler=None, restart_count=None)
    return Launch(kind=kind, **(known | facts))


SLURM = dict(job_id="17", scheduler="slurm", restart_count=0)


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, launch_of("none", rank=0, size=1, local_rank=0, local_size=1)),
        (OPENMPI, launch_of("openmpi")),
        (HYDRA, launch_of("hydra")),
        (PALS, launch_of("pals")),
        (STEP, launch_of("slurm", **SLURM)),
        (BATCH_SCRIPT, launch_of("none", rank=0, size=1, local_rank=0, local_size=1, **SLURM)),
        (DAEMON | OPENMPI, launch_of("openmpi", **SLURM)),
        (DAEMON | HYDRA, launch_of("hydra", **SLURM)),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, launch_of("slurm", **SLURM)),
        (STEP | {"PMIX_RANK": "3"}, launch_of("slurm", **SLURM)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, launch_of("hydra", local_rank=None, local_size=None)),
        ({"PMIX_RANK": "3"}, launch_of("pmix", size=None, local_rank=None, local_size=None)),
    ],
    ids=[
        "alone",
        "openmpi",
        "hydra",
        "pals",
        "srun",
        "batch script",
        "mpirun of Open MPI in a Slurm job",
        "mpiexec of MPICH in a Slurm job",
        "srun --mpi=pmi2",
        "srun --mpi=pmix",
        "other PMI",
        "other PMIx",
    ],
)
def test_the_innermost_launcher_counts(environ: dict[str, str], expected: Launch) -> None:
    assert detect(environ) == expected


@pytest.mark.parametrize("step", [0xFFFFFFFA, 0xFFFFFFFB], ids=["interactive", "batch"])
def test_shells_started_by_slurm_are_not_ranks(step: int) -> None:
    found = detect(STEP | {"SLURM_STEP_ID": str(step)})
    assert (found.kind, found.rank, found.size) == ("none", 0, 1)


def test_the_size_is_that_of_the_step_and_not_of_the_job() -> None:
    found = detect(STEP | {"SLURM_NTASKS": "64", "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"})
    assert (found.size, found.local_rank, found.local_size) == (4, 0, 1)


def test_a_requeued_slurm_job_is_detected() -> None:
    assert detect(BATCH_SCRIPT | {"SLURM_RESTART_COUNT": "2"}).restart_count == 2


def test_a_pbs_job_is_detected() -> None:
    found = detect(HYDRA | {"PBS_JOBID": "123.server"})
    assert found == launch_of("hydra", job_id="123.server", scheduler="pbs")


@pytest.mark.parametrize("value", ["", "two", "-1", "1.0", "٣", "1_0", "9" * 5000])
@pytest.mark.parametrize(
    "environ, name", [(OPENMPI, "OMPI_COMM_WORLD_RANK"), (HYDRA, "PMI_SIZE"), (STEP, "SLURM_PROCID")]
)
def test_a_malformed_number_is_named(environ: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(LaunchError, match=f"^{name}=.* is not a number"):
        detect(environ | {name: value})


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(LaunchError, match="OMPI_COMM_WORLD_RANK=4 and OMPI_COMM_WORLD_SIZE=4"):
        detect(OPENMPI | {"OMPI_COMM_WORLD_RANK": "4"})


def test_a_node_outside_the_step_is_refused() -> None:
    with pytest.raises(LaunchError, match="SLURM_NODEID=2 does not fit SLURM_STEP_TASKS_PER_NODE=2"):
        detect(STEP | {"SLURM_NODEID": "2"})


@pytest.mark.parametrize("environ", [OPENMPI, HYDRA, PALS, STEP, DAEMON | OPENMPI, {"PBS_JOBID": "1"}])
def test_a_child_environment_has_no_launcher_variables(environ: dict[str, str]) -> None:
    own = {"PATH": "/bin", "OMPI_MCA_pml": "ob1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PRTE_PREFIX": "/opt/mpi"}
    assert without_launcher(environ | own) == own


@pytest.mark.ranks
def test_the_detected_launcher_agrees_with_mpi() -> None:
    from mpi4py import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    found = detect(os.environ)
    assert (found.rank, found.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert found.local_size == node.size
    # Open MPI may count the ranks of a node in another order than MPI does; the numbers are the same.
    assert sorted(node.allgather(found.local_rank)) == list(range(node.size))
    node.Free()
