"""Registration, rendezvous and joining: no port, no hang, one clear error, and no cost for programs without it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from support.pace import scaled

from hpctrain import log
from hpctrain.cluster.launcher import without_launcher
from hpctrain.errors import UsageError
from hpctrain.torch_backend.environment import Place, variables
from hpctrain.torch_backend.register import register
from hpctrain.torch_backend.requests import _gloo, backends, check_names, check_options, is_known
from hpctrain.torch_backend.world import warn_if_newer

LISTED = "import torch.distributed as d; print('hpctrain' in d.Backend.backend_list)"
OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**without_launcher(os.environ), **env}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("code", "env"),
    [
        (f"import torch; {LISTED}", {}),  # by torch's entry points
        (f"import hpctrain, torch; {LISTED}", OFF),
        (f"import torch; import hpctrain; {LISTED}", OFF),
    ],
)
def test_torch_knows_the_back_end(code: str, env: dict[str, str]) -> None:
    result = python(code, **env)
    assert result.stdout == "True\n" and not result.stderr, result


def test_an_error_does_not_break_the_import_of_torch() -> None:
    code = f"import sys; sys.modules['hpctrain.torch_backend.register'] = None; import torch; {LISTED}"
    result = python(code)
    assert result.returncode == 0 and result.stdout == "False\n"
    assert result.stderr.startswith("hpctrain: the back end of torch.distributed is not registered: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.long  # a loaded machine takes longer
def test_registration_takes_less_than_20_ms() -> None:
    code = "import time, torch; t = time.process_time(); import hpctrain; print(time.process_time() - t); " + LISTED
    taken = []
    while not taken or len(taken) < 4 and min(taken) > 0.02:  # load on the machine only adds time
        result = python(code, **OFF)
        seconds, listed = result.stdout.split()
        assert listed == "True", result
        taken.append(float(seconds))
    assert min(taken) < 0.02, taken


def test_a_misspelled_name_is_refused_with_the_likely_one() -> None:
    register()
    with pytest.raises(UsageError, match="did you mean hpctrain"):
        check_names("hpctran")
    with pytest.raises(UsageError, match="did you mean hpctrain"):
        check_names("cpu:hpctrian,cuda:nccl")
    for name in ("gloo", "undefined", "cpu:gloo,cuda:nccl", "cpu:hpctrain,cuda:nccl", "another"):
        check_names(name)  # torch refuses the last one itself


@pytest.mark.parametrize("names", ["gloo,hpc", "cpu:hpc,cuda:nccl", "HPC", "cuda:nccl,cpu:hpctran"])
def test_a_shortened_name_is_refused_with_the_known_ones(names: str) -> None:
    register()
    with pytest.raises(UsageError, match="unknown back end of torch.distributed: .*gloo, hpctrain, mpi, nccl"):
        check_names(names)


@pytest.mark.parametrize(
    "names",
    ["gloo,hpctrain", "cpu:hpctrain,nccl", "cpu:hpctrain,cpu:nccl", "gpu:hpctrain", "cuda:0:nccl,cpu:hpctrain"],
)
def test_a_malformed_list_of_back_ends_is_refused_with_the_form(names: str) -> None:
    register()
    with pytest.raises(UsageError, match="allowed are one name, or one name per type of device; write cpu:hpctrain,"):
        check_names(names)


def test_a_name_that_torch_registers_at_its_first_use_is_known() -> None:
    class Registry:  # as the class Backend of torch 2.14, which reads entry points
        backend_list = ["gloo"]

        @classmethod
        def _ensure_backend_registered(cls, name: str) -> None:
            if name == "nccl2":
                cls.backend_list.append(name)

    assert [is_known(name, Registry) for name in ("gloo", "nccl2", "nccl3")] == [True, True, False]
    assert is_known("gloo") and not is_known("nccl3")  # torch's own, of any version


def test_groups_of_fixed_ranks_refuse_to_be_reconfigured() -> None:
    check_options({"enable_reconfigure": False})
    with pytest.raises(UsageError, match="leave it out"):
        check_options({"enable_reconfigure": True})
    # How torch 2.14 makes a group of gloo.
    made = inspect.signature(_gloo()).bind(None, 0, 2, timeout=None, enable_reconfigure=False)
    assert made.arguments["rank"] == 0


def test_the_back_end_of_each_device_is_found() -> None:
    assert backends("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert backends("hpctrain") == {"cpu": "hpctrain", "cuda": "hpctrain"}


def test_a_newer_torch_is_reported_once() -> None:
    before = set(log.warned)
    for version in ("2.11.0", "2.14.1+cpu", "2.99.0", "2.99.0"):
        warn_if_newer(version)
    added = log.warned - before
    log.warned.difference_update(added)
    assert len(added) == 1 and "torch 2.99.0 is newer than 2.14" in added.pop()


def test_variables_of_a_rank_on_the_second_node() -> None:
    place = Place(5, 8, 1, 4, 1, 2, "n1", 3)
    found = variables(place, {"MASTER_ADDR": "mine", "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"})
    assert {name: found.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert found["GROUP_RANK"] == found["NODE_RANK"] == "1" and found["GROUP_WORLD_SIZE"] == "2"
    assert found["OMP_NUM_THREADS"] == "3" and found["TORCHELASTIC_RUN_ID"] == "77"
    assert "MASTER_ADDR" not in found and found["MASTER_PORT"] == "29500"
    assert variables(place, {})["MASTER_ADDR"] == "n1"


# Jobs -----------------------------------------------------------------------------------------------------------------

SOCKETS = """
import os, sys
from mpi4py import MPI

def sockets():
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    own = {os.readlink(link) for link in links if os.path.lexists(link)}
    rows = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/self/net/{table}").readlines()[1:]]
    return {row[9] for row in rows if f"socket:[{row[9]}]" in own}

before = sockets()  # those of MPI
import torch, torch.distributed as dist
dist.init_process_group("hpctrain")
tensor = torch.full((300000,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
store = dist.distributed_c10d._get_default_store()
store.set(f"key{dist.get_rank()}", "x")
store.wait(["key0", "key1"])
dist.new_group([0, 1])
row = f"{tensor[-1].item()} {dist.get_backend()} {dist.get_world_size()} {sockets() - before}\\n"
sys.stdout.write(row)  # in one piece, beside that of the other rank
"""


@pytest.mark.limit(120)
def test_groups_and_the_store_open_no_port(launch: Any) -> None:
    result = launch(2, SOCKETS)
    assert result.returncode == 0 and result.stdout.split("\n") == ["3.0 hpctrain 2 set()"] * 2 + [""], result


REPEATED = """
import sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
for turn in range(20):
    if turn % 2:
        dist.init_process_group("hpctrain", rank=rank, world_size=2)
    else:
        dist.init_process_group("hpctrain", init_method="hpctrain://", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    handle = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    handle.wait()
    store = dist.distributed_c10d._get_default_store()
    assert not store.check([f"{rank}"])  # keys of an earlier group are not found
    store.set(f"{rank}", "x")
    dist.barrier()
    dist.destroy_process_group()
    if turn == 1:
        threads = threading.active_count()
sys.stdout.write(f"threads {threading.active_count() - threads}\\n")  # in one piece
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(1) == 2  # MPI remains
"""


@pytest.mark.limit(120)
def test_groups_can_be_destroyed_and_made_again(launch: Any) -> None:
    result = launch(2, REPEATED)
    assert result.returncode == 0 and result.stdout == "threads 0\n" * 2, result


def test_one_process_is_a_world_of_its_own(launch: Any) -> None:
    code = """
import torch, torch.distributed as dist
dist.init_process_group("hpctrain", init_method="hpctrain://")
dist.all_reduce(torch.ones(3))
print(dist.get_rank(), dist.get_world_size())
"""
    result = launch(0, code)
    assert result.returncode == 0 and result.stdout == "0 1\n", result


LATE = '''
import sys
from datetime import timedelta
from mpi4py import MPI
import torch, torch.distributed as dist
where, rank = sys.argv[1], MPI.COMM_WORLD.Get_rank()
others = MPI.COMM_WORLD.group.Excl([1])
def deadline(call):
    """Return the time that a call has: short where rank 1 does not come, and the others arrive together."""
    if call != where:
        return timedelta(seconds=60)
    if rank == 1:
        MPI.COMM_SELF.recv()
    MPI.COMM_WORLD.Create_group(others).Barrier()
    return timedelta(seconds=1)
dist.init_process_group("hpctrain", timeout=deadline("first"))
dist.new_group([0, 1, 2], timeout=deadline("group"))
dist.destroy_process_group()
dist.init_process_group("hpctrain", timeout=deadline("again"))
'''


@pytest.mark.limit(120)
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("where", "what"),
    [("first", "init_process_group"), ("group", "new_group of 3 ranks"), ("again", "init_process_group")],
)
def test_a_rank_that_never_comes_is_named(launch: Any, where: str, what: str) -> None:
    result = launch(3, LATE, where)
    assert result.returncode == 1 and not result.survivors, result
    assert f"DeadlineError: {what}: rank 1 has not called it within 1 s" in result.stderr, result
    assert len(re.findall("ends the job", result.stderr)) in (1, 2), result  # before the watchdog exists, by each


def failing(launch: Any, code: str, **options: Any) -> Any:
    """Return the result of a job of two ranks that ends with an error."""
    before = "import os, sys, torch, torch.distributed as dist\n"
    result = launch(2, before + code, **options)
    assert result.returncode and not result.survivors, result
    return result


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("dist.init_process_group('hpctrain', rank=0, world_size=3)", "size 3; MPI has started this process as rank"),
        (
            "dist.init_process_group('hpctrain', rank=5, world_size=8)",
            "rank 5, size 8; MPI has started this process as",
        ),
        (
            "os.environ['RANK'] = '7'\ndist.init_process_group('hpctrain')",
            "environment variables: rank 7; MPI has started this process as rank",
        ),
        (
            "os.environ |= {'TORCHELASTIC_RUN_ID': '1', 'RANK': '2', 'WORLD_SIZE': '3'}\n"
            "dist.init_process_group('hpctrain')",
            "torchrun has started this process as rank 2 of 3, which is rank",
        ),
        ("os.environ['RANK'] = 'x'\ndist.init_process_group('hpctrain')", "RANK='x' is not a number"),
    ],
)
def test_ranks_that_contradict_mpi_are_refused(launch: Any, code: str, text: str) -> None:
    result = failing(launch, code)
    assert result.returncode == 2 and "LaunchError: " in result.stderr and text in result.stderr, result


def test_mpi_without_threads_is_refused_once(launch: Any) -> None:
    result = failing(launch, "dist.init_process_group('hpctrain')", env={"MPI4PY_RC_THREAD_LEVEL": "funneled"})
    assert result.returncode == 2 and "Traceback" not in result.stderr, result
    assert len(re.findall("needs MPI with THREAD_MULTIPLE", result.stderr)) == 1, result


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("names", "text"),
    [("hpctran", "did you mean hpctrain"), ("cpu:hpc,cuda:nccl", "known are gloo, hpctrain, mpi, nccl")],
)
def test_a_misspelled_back_end_is_one_error(launch: Any, names: str, text: str) -> None:
    result = failing(launch, f"dist.init_process_group({names!r})")
    assert result.returncode == 2, result
    assert len(re.findall(text, result.stderr)) == 1, result


START = "dist.init_process_group('hpctrain')\nrank = dist.get_rank()\n"


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("sys.exit(3)", "rank 1 has left, this one waits in all_reduce"),
        ("raise ValueError('no such thing')", "rank 1 of 2 on .* ends the job: ValueError: no such thing"),
    ],
)
def test_a_rank_that_ends_early_ends_the_job(launch: Any, what: str, text: str) -> None:
    result = failing(launch, f"{START}if rank == 1: {what}\ndist.all_reduce(torch.ones(3))\n")
    assert result.seconds < scaled(45) and len(re.findall("ends the job", result.stderr)) == 1, result
    assert re.search(text, result.stderr), result
    assert result.stderr.count("Traceback") == ("raise" in what), result  # by torch's hook and ours: once


def test_a_group_in_a_forked_process_is_an_error(launch: Any) -> None:
    code = f"""{START}
if not os.fork():
    try:
        dist.new_group([0, 1])
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    result = launch(2, "import os, torch, torch.distributed as dist\n" + code)
    assert (
        result.returncode == 0 and result.stdout.count("process groups in a forked process: MPI works in") == 2
    ), result
