"""Timeouts, aborts, forks and mismatched calls: one clear error, and no wrong data afterwards."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpctrain.errors import DeadlineError

SHORT = timedelta(seconds=0.3)
pytestmark = [pytest.mark.ranks(2, 3)]

LATE: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "all_reduce of 4 MiB": lambda group: dist.all_reduce(torch.ones(2**20), group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(3), 1, group=group),
    "all_gather": lambda group: dist.all_gather([torch.ones(3)] * group.size(), torch.ones(3), group=group),
    "reduce_scatter": lambda group: group.reduce_scatter_single(torch.ones(3), torch.ones(3 * group.size())).wait(),
    "all_to_all": lambda group: dist.all_to_all_single(torch.ones(12), torch.ones(12), group=group),
    "barrier": lambda group: group.barrier().wait(),
    "object": lambda group: dist.all_gather_object([None] * group.size(), "x", group=group),
    "recv": lambda group: dist.recv(torch.ones(3), 1, group=group),
    "recvAnySource": lambda group: dist.recv(torch.ones(3), group=group),
    "send": lambda group: dist.send(torch.ones(2**20), 1, group=group),
    "async": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(),
    "future": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait(),
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("warm", [False, True])
def test_a_rank_that_does_not_come_is_an_error(world: Any, name: str, warm: bool) -> None:
    group = dist.new_group(timeout=SHORT)
    if warm:
        group.set_timeout(timedelta(seconds=30))
        for length in (3, 2**20):
            dist.all_reduce(torch.ones(length), group=group)
        group.set_timeout(SHORT)
    if world.rank() == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r" timeout of 0\.3 s: .*\(process group \d+, \d+ ranks\)"):
            LATE[name](group)
        assert time.monotonic() - start < 10
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=r"process group \d+ cannot be used any more \(.*timeout of 0\.3 s"):
                dist.all_reduce(torch.ones(3), group=group)
            assert time.monotonic() - start < 0.2
    else:
        group.abort()
        with pytest.raises(RuntimeError, match=r"cannot be used any more \(it was aborted\)"):
            dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group(group)
    dist.barrier()  # other groups work


@pytest.mark.limit(120)
def test_a_group_that_a_rank_has_destroyed_is_an_error(world: Any) -> None:
    names = ["all_reduce", "all_reduce of 4 MiB", "all_gather", "barrier", "broadcast", "object", "recv"]
    groups = {name: dist.new_group(timeout=timedelta(seconds=30)) for name in names}
    for group in groups.values():
        dist.all_reduce(torch.ones(3), group=group)
    if world.rank() == 0:
        for name, group in groups.items():
            group.set_timeout(SHORT)
            with pytest.raises(RuntimeError, match=r" timeout of 0\.3 s: .*\(process group \d+, \d+ ranks\)"):
                LATE[name](group)
    else:  # each waits for rank 0 for some seconds
        threads = [threading.Thread(target=group.shutdown) for group in groups.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for group in groups.values():
        dist.destroy_process_group(group)
    dist.barrier()


def test_late_ranks_are_named(world: Any) -> None:
    group = dist.new_group(timeout=timedelta(seconds=30))
    tensor = group.comm.empty(2**20)  # in node memory, whose counters know the late ranks
    dist.all_reduce(tensor, group=group)
    group.set_timeout(SHORT)
    if world.rank() == 0:
        late = list(range(1, world.size()))
        with pytest.raises(DeadlineError, match=rf"local ranks \[{', '.join(map(str, late))}\] have not arrived"):
            dist.all_reduce(tensor, group=group)
    else:
        group.abort()
    assert dist.new_group([0], timeout=SHORT) is not None  # torch counts groups: all ranks must make each
    dist.destroy_process_group(group)


def test_abort_ends_an_operation_in_progress(world: Any) -> None:
    group = dist.new_group(timeout=timedelta(seconds=40))
    if world.rank() == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(DeadlineError, match="of this call of wait"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        group.abort()
        with pytest.raises(RuntimeError, match="all_reduce: it was aborted"):
            work.wait()
        assert work.is_completed() and not work.is_success() and isinstance(work.exception(), RuntimeError)
    else:
        group.abort()
    dist.destroy_process_group(group)


def test_waiting_for_a_message_may_be_repeated(world: Any) -> None:
    tensor = torch.full((3,), float(world.rank()))
    if world.rank() == 0:
        work = dist.irecv(tensor, 1)
        with pytest.raises(DeadlineError, match=r"recv has not .* timeout of 0\.05 s: no message from rank 1"):
            work.wait(timedelta(seconds=0.05))
        dist.barrier()
        work.wait()
        assert tensor.tolist() == [1.0] * 3
    else:
        dist.barrier()
        if world.rank() == 1:
            dist.send(tensor, 0)


def test_a_message_of_another_size_is_an_error(world: Any) -> None:
    for sent in (2, 5):
        group = dist.new_group(timeout=timedelta(seconds=30))
        if world.rank() == 1:
            dist.send(torch.ones(sent), 0, group=group)
        elif world.rank() == 0:
            with pytest.raises(
                RuntimeError, match="a message of (8|more) bytes from rank 1 does not fit a tensor of 12 bytes"
            ):
                dist.recv(torch.ones(3), 1, group=group)
        if world.rank():
            group.abort()
        dist.destroy_process_group(group)


def test_monitored_barrier_names_the_missing_ranks(world: Any, gloo: Any) -> None:
    group = dist.new_group(timeout=timedelta(seconds=30))
    for name_all in (False, True):
        dist.monitored_barrier(group, timedelta(seconds=20), name_all)
    dist.monitored_barrier(timeout=20.0)  # a float, as torch's function takes it; the default group
    dist.monitored_barrier(group)
    dist.monitored_barrier(gloo)  # that of torch
    first = dist.new_group([0])
    if world.rank() == 0:
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier after 0 ms"):
            dist.monitored_barrier(first, timedelta(0))
        with pytest.raises(TypeError, match="timedelta"):
            dist.monitored_barrier(group, "1")
        with pytest.raises(RuntimeError, match="Ranks 1(, 2)? failed to pass monitoredBarrier in 300 ms"):
            dist.monitored_barrier(group, SHORT, True)
    else:
        with pytest.warns(UserWarning, match="does not belong to the given group"):
            dist.monitored_barrier(first, timedelta(0))
        group.abort()
    dist.destroy_process_group(group)


FORKED = """
import os, sys, torch, torch.distributed as dist
from hpctrain.torch_backend.register import register
register()
dist.init_process_group("hpctrain")

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([index + 100.0 * dist.get_rank()])

rank = dist.get_rank()
total = torch.zeros(1)
for persistent in (False, True):
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=2, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    for epoch in range(2):
        for batch in loader:
            work = dist.all_reduce(batch, async_op=True)
            work.wait()
            total += batch.sum()
assert total.item() == 4 * (dist.get_world_size() * 28 + 8 * 100 * sum(range(dist.get_world_size()))), total

class Talking(Numbers):
    def __getitem__(self, index):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor

try:
    next(iter(torch.utils.data.DataLoader(Talking(), num_workers=1, multiprocessing_context="fork")))
except Exception as error:
    assert "from which this one was forked" in str(error), error
    print("refused")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.ranks(1)
def test_forked_workers_load_data_and_cannot_communicate(launch: Any) -> None:
    job = launch(2, FORKED, timeout=100)
    assert job.returncode == 0 and job.stdout.count("refused") == 2, job


MISMATCHED = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from hpctrain.torch_backend.register import register
register()
dist.init_process_group("hpctrain", timeout=timedelta(seconds=20))
rank = dist.get_rank()
calls = {
    "shape": lambda: dist.all_reduce(torch.ones(3 + rank)),
    "dtype": lambda: dist.all_reduce(torch.ones(3, dtype=(torch.float32, torch.int32)[rank])),
    "operation": lambda: dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), 0),
    "root": lambda: dist.broadcast(torch.ones(3), rank),
    "reduction": lambda: dist.all_reduce(torch.ones(3), (dist.ReduceOp.MAX, dist.ReduceOp.SUM)[rank]),
    "async": lambda: dist.all_reduce(torch.ones(3 + rank), async_op=True).wait(),
}
for name, call in calls.items():
    try:
        call()
    except RuntimeError as error:
        assert "the ranks differ in" in str(error) and "rank 0: " in str(error) and "rank 1: " in str(error), error
        assert str(error).count(".py:") >= 4, error  # the lines of torch and of this program, on both ranks
        print("refused", name)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
uneven = [torch.empty(1), torch.empty(2)]
dist.all_gather(uneven, torch.ones(1 + rank))
dist.destroy_process_group()
"""


@pytest.mark.ranks(1)
def test_detail_compares_the_calls_of_all_ranks(launch: Any) -> None:
    job = launch(2, MISMATCHED, timeout=100, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert job.returncode == 0 and job.stdout.count("refused") == 12, job


UNCHECKED = """
import os, time, torch, torch.distributed as dist
from datetime import timedelta
from hpctrain.torch_backend.register import register
register()
dist.init_process_group("hpctrain", timeout=timedelta(seconds=20))
rank = dist.get_rank()


def late(group):
    while rank and not os.path.exists(f"given_up_{length}"):
        time.sleep(0.01)
    try:
        dist.all_reduce(torch.ones(length), group=group)
    finally:
        open(f"given_up_{length}", "w").close()


for length in (3, 10**6):
    for call in (
        lambda group: dist.all_reduce(torch.ones(length + rank * length), group=group),
        lambda group: dist.broadcast(torch.ones(length + rank * length), 0, group=group),
        lambda group: dist.all_gather([torch.ones(length + rank)] * 2, torch.ones(length + rank), group=group),
        lambda group: dist.all_reduce(torch.ones(length), group=group) if rank else group.barrier().wait(),
        late,
    ):
        group = dist.new_group(timeout=timedelta(seconds=20))
        group.set_timeout(timedelta(seconds=0.2))
        try:
            call(group)
        except RuntimeError as error:
            print("error", str(error)[:200].replace(chr(10), " "))
        group.abort()
print("survived")
"""


@pytest.mark.ranks(1)
def test_mismatched_sizes_end_within_the_timeout(launch: Any) -> None:
    job = launch(2, UNCHECKED, timeout=100)
    assert job.returncode == 0 and job.stdout.count("survived") == 2, job
    assert job.stdout.count("error") >= 4, job  # of both ranks, the second of which comes late


ABSENT = """
from datetime import timedelta
import torch, torch.distributed as dist
from mpi4py import MPI
dist.init_process_group("hpctrain", timeout=timedelta(seconds=60))
if dist.get_rank() == 1:
    MPI.COMM_SELF.recv()
dist.group.WORLD.set_timeout(timedelta(seconds=1))
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.ranks(1)
def test_the_rank_that_others_wait_for_is_named(launch: Any) -> None:
    """The other rank whose time is over is in no collective either, but ends the job as well."""
    job = launch(3, ABSENT, timeout=50)
    assert job.returncode and not job.survivors, job
    (end,) = re.findall(r"rank [02] of 3 on .* ends the job: (.*)", job.stderr)
    assert end.startswith("DeadlineError: all_reduce has not completed within the timeout of 1 s"), end
    assert end.endswith("; rank 1 is in no collective") and "rank 2 is" not in end and "rank 0 is" not in end, end
