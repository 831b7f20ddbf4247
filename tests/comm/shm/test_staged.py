"""Collectives of private tensors around the limits between slots and between ways to reduce: compared with NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import folder_outside_memory, in_small_shm
from support.reductions import expected, same_bits, values

from hpctrain.comm.reduction import Reducer
from hpctrain.comm.shm.in_place import NodeQueue
from hpctrain.comm.shm.staged import DIRECT_BYTES, LARGE_SLOT, SLOT, StagedCollectives
from hpctrain.comm.transport.mpi import MpiTransport
from hpctrain.comm.transport.reserve import NoSpaceError
from hpctrain.comm.transport.window import SLAB, NodeBuffer, NodeMemory

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)


class FullMemory(NodeMemory):
    """Node memory without space for windows of their own."""

    refusals = 0

    def allocate(self, nbytes: int) -> tuple[NodeBuffer, int]:
        if nbytes >= SLAB:
            self.refusals += 1
            raise NoSpaceError("/dev/shm is full", everywhere=True)
        return super().allocate(nbytes)


def node_memory(comm: Any, kind: type[NodeMemory] = NodeMemory) -> NodeMemory:
    """Return memory of the ranks of this node. Collective."""
    ranks: MpiTransport = comm.transport.split_node()
    return kind(ranks)


@pytest.fixture(scope="module", params=[False, True], ids=["a_core_per_rank", "oversubscribed"])
def staged(comm: Any, request: pytest.FixtureRequest) -> Iterator[tuple[StagedCollectives, NodeMemory, bool]]:
    """Return the collectives, their memory, and whether they assume more ranks than cores."""
    memory = node_memory(comm)
    yield StagedCollectives(NodeQueue(memory), Reducer(), oversubscribed=request.param), memory, request.param
    memory.free()


def lengths(size: int, oversubscribed: bool, itemsize: int) -> list[int]:
    """Return numbers of elements around every limit, and of several pieces."""
    large = LARGE_SLOT[oversubscribed]
    limits = {SLOT, large, DIRECT_BYTES[oversubscribed] // max(size - 1, 1)}
    around = {limit // itemsize + offset for limit in limits for offset in (-1, 0, 1)}
    return sorted({1, 17, SLOT // itemsize // 3, *around, 2 * large // itemsize + 1})


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(staged: tuple[StagedCollectives, NodeMemory, bool], dtype: torch.dtype) -> None:
    collectives, memory, oversubscribed = staged
    everyone = [list(range(memory.size))]
    for numel in lengths(memory.size, oversubscribed, dtype.itemsize):
        for op in ("sum", "max"):
            tensor = values(memory.rank, numel, dtype)
            collectives.all_reduce(tensor, op)()
            assert same_bits(tensor, expected(everyone, numel, dtype, op)), (numel, op)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reduce_scatter_of_equal_shares(staged: tuple[StagedCollectives, NodeMemory, bool], dtype: torch.dtype) -> None:
    collectives, memory, oversubscribed = staged
    everyone = [list(range(memory.size))]
    for share in {-(-numel // memory.size) for numel in lengths(memory.size, oversubscribed, dtype.itemsize)}:
        tensor, out = values(memory.rank, share * memory.size, dtype), torch.empty(share, dtype=dtype)
        before = tensor.clone()
        collectives.reduce_scatter(out, tensor, "average")()
        wanted = expected(everyone, share * memory.size, dtype, "average")
        assert same_bits(out, wanted[memory.rank * share :][:share]), share
        assert same_bits(tensor, before)


@pytest.mark.ranks
@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather_and_broadcast(staged: tuple[StagedCollectives, NodeMemory, bool], in_place: bool) -> None:
    collectives, memory, oversubscribed = staged
    for numel in lengths(memory.size, oversubscribed, 4):
        tensors = [values(rank, numel, torch.int32) for rank in range(memory.size)]
        out = torch.zeros(numel * memory.size, dtype=torch.int32)
        place = out[memory.rank * numel :][:numel].copy_(tensors[memory.rank]) if in_place else tensors[memory.rank]
        collectives.all_gather(out, place)()
        assert same_bits(out, torch.cat(tensors)), numel
        root = numel % memory.size
        collectives.broadcast(place, root)()
        assert same_bits(place, tensors[root]), numel


@pytest.mark.ranks
def test_no_slot_is_refilled_too_early(staged: tuple[StagedCollectives, NodeMemory, bool]) -> None:
    """Call operations of three pieces directly after each other: each begins with the slot of the last piece."""
    collectives, memory, oversubscribed = staged
    numel = LARGE_SLOT[oversubscribed] // 4 * 3 - 5
    tensors = [torch.empty(numel) for _ in range(5)]
    calls = [
        collectives.broadcast(tensors[0], 0),
        collectives.broadcast(tensors[1], 0),
        collectives.all_reduce(tensors[2], "max"),
        collectives.broadcast(tensors[3], memory.size - 1),
        collectives.all_reduce(tensors[4], "sum"),
    ]
    last = memory.size - 1.0
    wanted = [0.0, 1.0, 2.0 + last, 3.0 + last, 4.0 * memory.size + sum(range(memory.size))]
    wrong: list[tuple[int, int]] = []  # asserted after the loop, which all ranks must complete
    for turn in range(10):
        for number, tensor in enumerate(tensors):
            tensor.fill_(number + memory.rank).add_(turn)
        for call in calls:
            call()
        for number, (tensor, value) in enumerate(zip(tensors, wanted)):
            if not tensor.eq(value + turn * (memory.size if number == 4 else 1)).all():
                wrong.append((turn, number))
    assert not wrong


@pytest.mark.ranks
def test_operations_of_any_length_follow_each_other(staged: tuple[StagedCollectives, NodeMemory, bool]) -> None:
    collectives, memory, oversubscribed = staged
    everyone, large = [list(range(memory.size))], LARGE_SLOT[oversubscribed] // 4
    for turn in range(12):
        numel = (5, large // 2, 2 * large + 7, SLOT // 4)[turn % 4]
        own = values(memory.rank, numel, torch.float32, turn)
        op, root = ("sum", "max", "average")[turn % 3], turn % memory.size
        collectives.all_reduce(own, op)()
        wanted = expected(everyone, numel, torch.float32, op, turn)
        assert same_bits(own, wanted), turn
        if turn % 2:
            gathered = torch.empty(numel * memory.size)
            collectives.all_gather(gathered, own + memory.rank)()
            assert same_bits(gathered, torch.cat([wanted + rank for rank in range(memory.size)])), turn
        else:
            copied = own + memory.rank
            collectives.broadcast(copied, root)()
            assert same_bits(copied, wanted + root), turn


@pytest.mark.ranks
@pytest.mark.parametrize("op", ["min", "max", "sum", "product"])
def test_ranks_with_other_numbers_of_threads_get_the_same_bits(
    comm: Any, staged: tuple[StagedCollectives, NodeMemory, bool], op: str
) -> None:
    # Torch divides long loops among threads, and keeps another zero or NaN in the remainder of each.
    collectives, memory, _ = staged
    numel, before = 65_537, torch.get_num_threads()
    zeros = torch.full((numel,), -0.0 if memory.rank % 2 else 0.0)
    nans = torch.full((numel,), 0x7FC00000 + memory.rank, dtype=torch.int32).view(torch.float32)
    torch.set_num_threads(1 + memory.rank % 2 * 2)
    try:
        for tensor in (zeros, nans):
            collectives.all_reduce(tensor, op)()
    finally:
        torch.set_num_threads(before)
    for tensor in (zeros, nans):
        first = tensor.clone()
        collectives.broadcast(first, 0)()
        assert same_bits(tensor, first)


# Little shared memory -------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_long_tensors_use_the_small_slots_if_shared_memory_is_full(comm: Any) -> None:
    memory = node_memory(comm, FullMemory)
    assert isinstance(memory, FullMemory)
    collectives, everyone = StagedCollectives(NodeQueue(memory), Reducer()), [list(range(memory.size))]
    for numel in (SLOT, SLOT + 1, 5 * SLOT + 3):
        tensor = values(memory.rank, numel, torch.float32)
        collectives.all_reduce(tensor, "sum")()
        assert same_bits(tensor, expected(everyone, numel, torch.float32, "sum")), numel
    assert memory.refusals == 1  # it asks once: the request is collective
    memory.free()


PROGRAM = f"""
import os, torch, hpctrain
job = hpctrain.init()
small = torch.ones(1000); job.comm.all_reduce(small, algorithm="window")
if job.rank == 0:
    state = os.statvfs("/dev/shm")
    with open("/dev/shm/filler", "wb") as filler:
        filler.write(bytes(state.f_bavail * state.f_frsize - 3 * 2**20))
job.comm.barrier()
own = torch.full(({4 * LARGE_SLOT[False]},), job.rank + 1.0)
job.comm.all_reduce(own, algorithm="window")
share = torch.empty(own.numel() // job.size); job.comm.reduce_scatter(share, own, algorithm="window")
print(f"result {{[float(one[-1]) for one in (small, own, share)]}}\\n", end="", flush=True)
"""


@pytest.fixture
def tmp_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from folder_outside_memory(monkeypatch)


@pytest.mark.few(1)
def test_a_full_shared_memory_is_enough_for_long_tensors(launch: Any) -> None:
    result = launch(2, PROGRAM, prefix=in_small_shm(64), timeout=60)
    assert result.returncode == 0, result
    assert result.stdout.count("result [2.0, 3.0, 6.0]") == 2, result
