"""The examination of a login node: facts are gathered concurrently, and each topic yields findings."""

from __future__ import annotations

import json
from dataclasses import replace

from support.doctoring import MISSING, facts, mpi, slurm, told

from hpctrain.doctor.login import resources
from hpctrain.doctor.login.environment import Interpreter
from hpctrain.doctor.login.examine import LoginFacts, check
from hpctrain.doctor.login.libraries import Gpus
from hpctrain.doctor.login.resources import ProcessLimits
from hpctrain.doctor.login.schedulers import Pbs
from hpctrain.util.probe import Answer

ROOM = facts(there=True, writable=True, size=2**40, free=2**38, files=0, files_free=0)
FINE = LoginFacts(
    environ={},
    host="login1",
    interpreter=Interpreter((3, 12, 1), "/venv", True, "/venv/lib", ""),
    torch=facts(version="2.13.0+cpu", seconds=2.0, cuda=None),
    gpus=Gpus(MISSING, Answer(error="No module named 'cupy'")),
    mpi=mpi(),
    hdf5=facts(h5py="3.16.0", hdf5="2.0.0", mpi=False),
    slurm=slurm(),
    pbs=Pbs(MISSING),
    limits=ProcessLimits(8, tuple(range(8)), 65536, None, None, 0, None, 2**36, rdma=False),
    storage=[resources.FolderFacts("shm", "/dev/shm", ROOM)],
)


def test_a_good_environment_has_one_finding_per_topic() -> None:
    found = check(FINE)
    assert told(found) == []
    topics = "node Python hpctrain torch GPUs MPI mpiexec HDF5 modules Slurm srun cores memory"
    assert [finding.topic for finding in found] == [*topics.split(), "node memory"]


def test_running_as_one_rank_of_several_is_noted() -> None:
    task = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    found = check(replace(FINE, environ=task))
    assert found[0].found == "login1, in job 7 of Slurm" and told(found) == [("note", "node")]


def test_contradicting_variables_are_a_finding() -> None:
    found = check(replace(FINE, environ={"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "2"}))
    assert told(found) == [("note", "node")] and "contradict each other" in found[0].found


def test_a_given_script_is_checked() -> None:
    assert ("error", "script") in told(check(FINE, "#SBATCH --nodes=2\n#SBATCH --bad\nsrun a\n"))


def test_json_facts_contain_no_environment_variables() -> None:
    told_facts = json.dumps(replace(FINE, environ={"SECRET": "swordfish"}).to_json())
    assert "swordfish" not in told_facts
    assert {"host": "login1", "srun_mpi": "pmi2"}.items() <= json.loads(told_facts).items()
