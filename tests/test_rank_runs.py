"""Sessions of pytest on several ranks, started as jobs: selection, report, and end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.pace import scaled
from support.sessions import Sessions


@pytest.fixture
def session(tmp_path: Path, launch: Any) -> Sessions:
    """Return a function that runs a file of tests on n ranks."""
    return Sessions(tmp_path / "project", launch)


SELECTION = """
def test_serial(): pass
@pytest.mark.ranks
def test_any(): pass
@pytest.mark.ranks(2, 4)
def test_two_or_four(): pass
@pytest.mark.ranks(1, 3)
def test_one_or_three(): pass
"""


@pytest.mark.parametrize(
    "n, selected",
    [
        (0, {"test_serial", "test_one_or_three"}),
        (1, {"test_serial", "test_one_or_three"}),
        (2, {"test_any", "test_two_or_four"}),
        (3, {"test_any", "test_one_or_three"}),
    ],
)
def test_tests_are_selected_by_size_and_reported_once(session: Any, n: int, selected: set[str]) -> None:
    result = session(n, SELECTION, "-v")
    assert result.returncode == 0, result
    assert {name for name in SELECTION.split() if f"::{name.removesuffix('():')} PASSED" in result.stdout} == {
        f"{name}():" for name in selected
    }
    assert result.stdout.count("test session starts") == 1
    assert f"{len(selected)} passed, {4 - len(selected)} deselected" in result.stdout


# The ranks of most sessions here use plain MPI, because the fixture comm imports torch, which takes seconds.


def test_a_failure_of_any_rank_fails_the_test_and_is_reported_once(session: Any) -> None:
    """A shared folder is the same on all ranks in spite of failures."""
    source = """
from mpi4py.MPI import COMM_WORLD as comm
@pytest.mark.ranks
def test_first():
    print("said before")
    assert comm.rank != 1, "rank one is wrong"
@pytest.mark.ranks
def test_second(): comm.barrier()
@pytest.mark.ranks
def test_third(): assert comm.rank, "rank zero is wrong"
@pytest.mark.ranks
def test_folder(shared_tmp_path, tmp_path):
    (shared_tmp_path / str(comm.rank)).touch()
    comm.barrier()
    assert len(list(shared_tmp_path.iterdir())) == comm.size
    assert comm.rank == 0 or tmp_path != shared_tmp_path
"""
    result = session(2, source)
    assert result.returncode != 0
    assert "failed on rank 1, call: AssertionError: rank one is wrong" in result.stdout
    assert "2 failed, 3 passed" in result.stdout, result  # if rank 1 fails, rank 0's own call has passed
    assert "[rank 1] test_inner.py::test_first (call)" in result.stderr and "said before" in result.stderr
    assert result.stderr.count("[rank 1]") == 1 and "rank zero is wrong" not in result.stderr


def test_stop_at_the_first_failure_stops_every_rank(session: Any) -> None:
    source = """
from mpi4py.MPI import COMM_WORLD as comm
@pytest.mark.ranks
def test_it(): assert comm.rank != 1
@pytest.mark.ranks
def test_more(): comm.barrier()
"""
    result = session(2, source, "-x", timeout=30)
    assert result.returncode != 0 and "stopping after 1 failures" in result.stdout and result.seconds < scaled(25)


@pytest.mark.long
def test_a_hang_ends_with_the_stacks_of_every_rank(session: Any) -> None:
    source = """
from mpi4py.MPI import COMM_WORLD as comm
@pytest.fixture
def left():
    yield
    if comm.rank == 0: waiting_for_the_other()
@pytest.mark.ranks
@pytest.mark.limit(4)
def test_hang(left):
    if comm.rank: sleeping()
    assert False, "why the others wait"
def waiting_for_the_other(): comm.barrier()
def sleeping(): time.sleep(100)
"""
    result = session(2, source, timeout=40)
    assert result.returncode != 0 and result.seconds < scaled(30) and not result.survivors
    assert "[rank 0] test_inner.py::test_hang is not done after 4 s" in result.stderr
    assert "in waiting_for_the_other" in result.stderr and "in sleeping" in result.stderr
    assert "before that, failed: test_inner.py::test_hang (call)" in result.stderr
    assert "AssertionError: why the others wait" in result.stderr


def test_a_hang_in_one_process_ends(session: Any) -> None:
    result = session(0, "def test_hang(): time.sleep(100)\n", "-o", "test_limit=1")
    assert result.returncode == 1 and result.seconds < scaled(15)
    assert "test_inner.py::test_hang is not done after 1 s" in result.stderr and "in test_hang" in result.stderr


@pytest.mark.long
def test_a_hang_that_holds_the_interpreter_ends(session: Any) -> None:
    source = "import re\ndef test_hang(): re.match('(a*)*b', 'a' * 64)\n"
    result = session(0, source, "-o", "test_limit=1", timeout=30)
    assert result.returncode == 1 and "Timeout" in result.stderr and "in test_hang" in result.stderr


def test_ranks_that_collect_different_tests_do_not_start(session: Any) -> None:
    source = """
@pytest.mark.ranks
@pytest.mark.parametrize("pid", [os.getpid()])
def test_it(pid): pass
"""
    result = session(2, source)
    assert result.returncode != 0 and "rank 0 and rank 1 collected different tests" in result.stderr


def test_a_file_that_one_rank_cannot_import_stops_all(session: Any) -> None:
    source = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1: raise ImportError("only here")
@pytest.mark.ranks
def test_it(): pass
"""
    result = session(2, source, timeout=30)
    assert result.returncode != 0 and "[rank 1]" in result.stderr and "only here" in result.stderr


def test_singletons_are_refused(session: Any) -> None:
    task = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    result = session(0, "def test_it(): pass\n", env=task)
    assert result.returncode == 4 and "ERROR: srun started 2 processes, but" in result.stderr


@pytest.mark.long
def test_gpu_tests_are_skipped_without_a_gpu(session: Any) -> None:
    result = session(0, "@pytest.mark.gpu\ndef test_it(): pass\n", env={"CUDA_VISIBLE_DEVICES": ""})
    assert "needs a GPU" in result.stdout


def test_a_job_gets_its_arguments_and_no_variables_of_a_launcher(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "5")
    code = "import os, sys\nprint(sys.argv[1:], *map(os.getenv, ['PMI_RANK', 'OMP_NUM_THREADS', 'X', 'HOME']))"
    result = launch(0, code, "a", 2, env={"X": "y", "HOME": None})
    assert (result.returncode, result.stdout) == (0, "['a', '2'] None 1 y None\n")


def test_a_job_beyond_its_time_limit_is_killed_with_all_its_children(launch: Any) -> None:
    code = "import subprocess, sys, time\nprint('begun', flush=True)\nsubprocess.run(['sleep', '300'])"
    with pytest.raises(pytest.fail.Exception, match="(?s)not done after 3 s.*begun"):
        launch(2, code, timeout=3)


def test_surviving_processes_are_named_and_killed(launch: Any) -> None:
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '300'], start_new_session=True).pid)"
    result = launch(0, code)
    assert result.survivors == (int(result.stdout),)
    time.sleep(0.2)
    assert not Path(f"/proc/{result.survivors[0]}/exe").exists()
