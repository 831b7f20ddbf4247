"""Large asynchronous collectives that run at once when all ranks have called them and cores are scarce."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import TIMEOUT
from torch import Tensor

import hpctrain
from hpctrain.torch_backend.called import LEAST_BYTES, CalledCollectives
from hpctrain.torch_backend.work import Engine

ELEMENTS = LEAST_BYTES // 4 + 3

ranks = pytest.mark.ranks(2, 3, 4)


@pytest.fixture
def threads(request: pytest.FixtureRequest, world: Any) -> Iterator[int]:
    """Let each rank compute with so many threads; with the number of cores, no core is left for the group's thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


scarce = pytest.mark.parametrize("threads", [len(os.sched_getaffinity(0))], indirect=True)


def values(rank: int, turn: int = 0) -> Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32).remainder_(251) + 3 * rank + turn


def total(size: int, turn: int = 0) -> Tensor:
    return torch.stack([values(rank, turn) for rank in range(size)]).sum(0)


@ranks
@scarce
def test_the_last_caller_carries_it_out_at_once(world: Any, threads: int) -> None:
    rank, last, token = world.rank(), world.size() - 1, torch.zeros(1)
    dist.all_reduce(values(rank))  # the first one creates the counters
    tensor = values(rank)
    if rank == last:
        for _ in range(last):
            dist.recv(token)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.is_completed() or rank != last
    if rank != last:
        dist.send(token, last)
    assert work.wait() and work.is_success() and torch.equal(tensor, total(world.size()))
    assert work.get_future().value()[0] is tensor


@ranks
@scarce
def test_a_caller_does_not_wait_for_late_ranks(world: Any, threads: int) -> None:
    """Rank 0 calls first and then sends the message for which the others wait before they call."""
    rank, token = world.rank(), torch.zeros(1)
    for turn in range(3):
        tensor = values(rank, turn)
        if rank:
            dist.recv(token, 0)
        work = dist.all_reduce(tensor, async_op=True)
        if not rank:
            for peer in range(1, world.size()):
                dist.send(token, peer)
        assert work.wait(timedelta(seconds=60)) and torch.equal(tensor, total(world.size(), turn))


@ranks
@scarce
def test_callbacks_that_call_it_end_the_counting(world: Any, threads: int) -> None:
    """Order of calls differs then between ranks whose operation ran at once and those whose thread carried it out."""
    counters = CalledCollectives(hpctrain.Communicator.world())
    counters.create()
    first = counters.announce()
    dist.barrier()
    assert counters.by_all(first, True)
    dist.barrier()
    if not world.rank():
        counters.stop_counting()
    dist.barrier()
    for _ in range(3):
        assert not counters.by_all(counters.announce(), True)


@ranks
@pytest.mark.parametrize("threads", [1, len(os.sched_getaffinity(0))], indirect=True)
def test_callbacks_call_large_collectives_too(world: Any, threads: int) -> None:
    rank, size = world.rank(), world.size()
    group = dist.new_group(timeout=TIMEOUT)

    def reduce_again(future: Any) -> Tensor:
        tensor: Tensor = future.value()[0]
        dist.all_reduce(tensor, group=group)
        return tensor

    for turn in range(10):
        chained = dist.all_reduce(values(rank, turn), group=group, async_op=True).get_future().then(reduce_again)
        tensors = [values(rank, number) for number in range(3)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        assert torch.equal(chained.wait(), total(size, turn) * size)
        for number, (tensor, work) in enumerate(zip(tensors, works)):
            work.wait()
            assert torch.equal(tensor, total(size, number))
    dist.destroy_process_group(group)


def test_an_error_of_an_operation_at_once_is_that_of_its_handle() -> None:
    def fail() -> None:
        raise ValueError("no such tensor")

    work = Engine().run("all_reduce", fail, [], async_op=True, called_by_all=lambda wait: True)
    assert work.is_completed() and not work.is_success()
    with pytest.raises(ValueError, match="no such tensor"):
        work.wait()
    with pytest.raises(RuntimeError, match="no such tensor"):
        work.get_future().wait()


def test_only_an_idle_engine_lets_the_caller_wait_for_other_ranks() -> None:
    asked: list[bool] = []
    engine = Engine()

    def not_called_by_all(wait: bool) -> bool:
        asked.append(wait)
        return False

    release = threading.Event()
    engine.run(
        "all_reduce", lambda: None if release.wait() else None, [], async_op=True, called_by_all=not_called_by_all
    )
    second = engine.run("all_reduce", lambda: None, [], async_op=True, called_by_all=not_called_by_all)
    release.set()
    second.wait()
    engine.drain()
    engine.run("all_reduce", lambda: None, [], async_op=True, called_by_all=not_called_by_all).wait()
    engine.close()
    assert asked == [True, False, True]
