"""One-sided memory, accessed without its owner's help: every carrier compared with plain NumPy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.comm.rma.remote_memory import WORDS, Lock
from hpctrain.errors import DeadlineError, UsageError

pytestmark = pytest.mark.ranks
LIMIT = 60.0  # seconds


@pytest.fixture(params=["mpi", "messages"])
def make(comm: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that exposes memory of this rank, by a carrier."""
    from hpctrain.comm.rma.select import expose

    monkeypatch.setenv("HPCTRAIN_ONESIDED", request.param)
    made: list[Any] = []

    def make(length: int, words: int = WORDS, dtype: torch.dtype = torch.float32) -> Any:
        made.append(expose(comm.transport, length, dtype, words))
        return made[-1]

    yield make
    for one in made:
        one.free()


def test_all_ranks_put_get_and_add_on_every_rank(comm: Any, make: Any) -> None:
    remote = make(4 * comm.size)
    mine = np.full(4, comm.rank + 1, dtype=np.float32)
    for rank in range(comm.size):
        remote.put(rank, torch.from_numpy(10 * mine), 4 * comm.rank)
        remote.add(rank, torch.from_numpy(mine), 4 * comm.rank)
    remote.barrier()
    expected = np.repeat(11 * np.arange(1, comm.size + 1, dtype=np.float32), 4)
    for rank in range(comm.size):
        out = torch.empty(2, 2 * comm.size)
        remote.get(rank, out)
        assert np.array_equal(out.numpy().reshape(-1), expected)
    assert np.array_equal(remote.view(comm.rank).numpy(), expected)
    remote.barrier()


def test_lengths_differ_and_may_be_zero(comm: Any, make: Any) -> None:
    remote = make(3 * comm.rank, dtype=torch.float64)
    after = (comm.rank + 1) % comm.size
    remote.add(after, torch.ones(3 * after, dtype=torch.float64))
    remote.barrier()
    for rank in range(comm.size):
        out = torch.zeros(3 * rank, dtype=torch.float64)
        remote.get(rank, out)
        assert out.eq(1).all()
    remote.barrier()


def test_no_fetch_add_on_a_counter_is_lost(comm: Any, make: Any) -> None:
    remote, times = make(0, words=2), 200
    seen = [remote.fetch_add(0, 1, 1) for _ in range(times)]
    assert seen == sorted(seen) and len(set(seen)) == times
    remote.barrier()
    assert remote.fetch_add(0, 1) == times * comm.size
    remote.barrier()


def test_no_update_under_the_lock_is_lost(comm: Any, make: Any) -> None:
    """N ranks read, change and write M times: without the lock, reads of the same number lose updates."""
    remote, times = make(8, words=1 + WORDS), 40
    lock = Lock(remote, 1)
    target = comm.size - 1
    for _ in range(times):
        with lock.of(target):
            values = torch.empty(8)
            remote.get(target, values)
            remote.put(target, values + 1)
    remote.barrier()
    final = torch.empty(8)
    remote.get(target, final)
    assert final.tolist() == [times * comm.size] * 8
    remote.barrier()


def test_a_rank_that_holds_the_lock_too_long_is_named(comm: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = make(1, words=2 + WORDS)
    lock = Lock(remote, 2)
    if comm.rank == 0:
        with lock.of(0):
            remote.barrier()
            while remote.fetch_add(0, 1) < comm.size - 1:
                remote.progress()
    else:
        remote.barrier()
        monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.2")
        with pytest.raises(DeadlineError, match="held by rank 0") if comm.rank == 1 else pytest.raises(DeadlineError):
            with lock.of(0):
                pass
        monkeypatch.delenv("HPCTRAIN_TIMEOUT")
        remote.fetch_add(0, 1, 1)
    remote.barrier()


@pytest.mark.ranks(2)
def test_a_rank_missing_from_a_barrier_is_named(comm: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = make(1)
    if comm.rank == 0:
        monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.2")
        with pytest.raises(DeadlineError, match=r"a barrier of all workers: ranks \[1\] have not arrived within 0.2 s"):
            remote.barrier()
        monkeypatch.delenv("HPCTRAIN_TIMEOUT")
        comm.transport.barrier()
    else:
        comm.transport.barrier()
        remote.barrier()


def test_a_computing_owner_does_not_block_its_neighbours(comm: Any, make: Any) -> None:
    """The owner makes no call until it sees in its memory that all neighbours have finished their accesses."""
    remote = make(comm.size, words=1 + WORDS)
    lock = Lock(remote, 1)
    neighbours = [rank for rank in range(comm.size) if remote.view(rank) is not None]
    owner = neighbours[0]
    if comm.rank == owner:
        own, end = remote.view(owner), time.monotonic() + LIMIT
        while int(own[neighbours].sum()) < len(neighbours) - 1:
            assert time.monotonic() < end, "the others did not get on"
    else:
        with lock.of(owner):
            remote.add(owner, torch.ones(1), comm.rank)
    remote.barrier()


def test_other_nodes_are_served_while_the_owner_makes_progress(comm: Any, make: Any) -> None:
    remote = make(comm.size, words=1 + WORDS)
    with remote.recording() as recorder:
        if comm.rank == 0:
            own, end = remote.view(0), time.monotonic() + LIMIT
            while int(own.sum()) < comm.size - 1:
                remote.progress()
                assert time.monotonic() < end, "the others did not get on"
        else:
            remote.add(0, torch.ones(1), comm.rank)
    far = comm.rank != 0 and remote.view(0) is None
    assert recorder.bytes["add"] == (4 if far else 0)
    remote.barrier()


def test_accesses_out_of_range_or_of_wrong_type_are_refused(comm: Any, make: Any) -> None:
    remote = make(4)
    for rank, start, values in (
        (comm.size, 0, torch.zeros(1)),
        (-1, 0, torch.zeros(1)),
        (0, 1, torch.zeros(4)),
        (0, -1, torch.zeros(1)),
        (0, 0, torch.zeros(1, dtype=torch.float64)),
        (0, 0, torch.zeros(4, 2)[:, 0]),
    ):
        for call in (remote.get, remote.put, remote.add):
            with pytest.raises(UsageError, match="exposed memory|elements"):
                call(rank, values, start)
    remote.barrier()


# Rows of matrices ----------------------------------------------------------------------------------------------------


START, HEIGHT, WIDTH = 5, 12, 3
ROWS = torch.tensor([7, 0, 1, 2, 11])  # a single row, adjacent rows, and the last row


def test_exactly_the_given_rows_are_put_added_and_read(comm: Any, make: Any) -> None:
    """The memory holds some elements, a matrix, and one further element."""
    remote = make(START + HEIGHT * WIDTH + 1)
    target = (comm.rank + (comm.size + 1) // 2) % comm.size  # on another node, if there are two
    values = torch.arange(15.0).view(5, WIDTH)
    with remote.recording() as recorder:
        remote.put_rows(target, values, ROWS, START)
        remote.add_rows(target, values[:2] + 100, ROWS[:2], START)
        remote.add_rows(target, torch.empty(0, WIDTH), ROWS[:0], START)
        back = torch.empty(3, WIDTH)
        remote.get_rows(target, back, ROWS[:3], START)
    far = remote.view(target) is None
    assert dict(recorder.bytes) == ({"put_rows": 60, "add_rows": 24, "get_rows": 36} if far else {})
    assert recorder.calls["get_rows"] == far
    remote.barrier()
    matrix = np.zeros((HEIGHT, WIDTH), dtype=np.float32)
    matrix[ROWS.numpy()] = values.numpy()
    matrix[ROWS[:2].numpy()] += values[:2].numpy() + 100
    assert np.array_equal(back.numpy(), matrix[ROWS[:3].numpy()])
    whole = np.concatenate([np.zeros(START, np.float32), matrix.reshape(-1), np.zeros(1, np.float32)])
    assert np.array_equal(remote.view(comm.rank).numpy(), whole)
    remote.barrier()


def test_rows_out_of_range_are_refused(comm: Any, make: Any) -> None:
    remote = make(START + HEIGHT * WIDTH + 1)
    for rows, values in (
        (torch.tensor([HEIGHT]), torch.zeros(1, WIDTH)),
        (torch.tensor([-1]), torch.zeros(1, WIDTH)),
        (torch.tensor([0, 1]), torch.zeros(1, WIDTH)),
        (torch.tensor([0], dtype=torch.int32), torch.zeros(1, WIDTH)),
        (torch.tensor([0]), torch.zeros(WIDTH)),
        (torch.tensor([0]), torch.zeros(1, WIDTH, dtype=torch.float64)),
    ):
        for call in (remote.get_rows, remote.put_rows, remote.add_rows):
            with pytest.raises(UsageError, match="exposed memory|elements|rows"):
                call(comm.size - 1, values, rows, START)
    remote.barrier()
