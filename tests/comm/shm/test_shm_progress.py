"""Asynchronous reduce_scatter in node memory: bitwise equal to the blocking call, however it is completed."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from support.nodes import by_memory, by_node
from support.reductions import DTYPES, expected, ops_of, same_bits, values
from torch import Tensor

from hpctrain.comm.prepared import CollectiveCall, FlatHostCollectives
from hpctrain.comm.reduction import BLOCK
from hpctrain.errors import CommunicationError

Nodes = tuple[Any, list[list[int]]]
LENGTHS = (1, 3, 64, 1000)

pytestmark = pytest.mark.ranks


def lent(comm: Any, tensor: Tensor) -> Tensor:
    """Return a copy in node memory."""
    return comm.empty(tensor.numel(), tensor.dtype).copy_(tensor)


def wanted(comm: Any, numel: int, dtype: torch.dtype, op: str, seed: int = 0) -> Tensor:
    """Return the share of this rank, of ``numel`` elements."""
    return expected(by_node(comm), numel * comm.size, dtype, op, seed).chunk(comm.size)[comm.rank]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_equal_those_of_a_blocking_call_in_memory_of_every_kind(placed: Any, dtype: torch.dtype) -> None:
    comm = placed
    for numel, op in (*product(LENGTHS, ops_of(dtype)), (BLOCK + 7, "sum")):
        tensor = lent(comm, values(comm.rank, numel * comm.size, dtype))
        waited = comm.reduce_scatter(torch.empty(numel, dtype=dtype), tensor, op, algorithm=by_memory(comm))
        assert same_bits(waited, wanted(comm, numel, dtype, op)), (numel, op)
        for out in (torch.empty(numel, dtype=dtype), comm.empty(numel, dtype), tensor.chunk(comm.size)[comm.rank]):
            comm.reduce_scatter(out, tensor, op, async_op=True).wait()
            assert same_bits(out, waited), (numel, op)


@pytest.mark.parametrize("seed", [0, 10, 20])
def test_reductions_of_both_kinds_are_waited_for_in_any_order(placed: Any, seed: int) -> None:
    comm = placed
    shares, works, checks = [100, 5000, 1, 777, 3000], [], []
    for number, share in enumerate(shares):
        tensor, out = lent(comm, values(comm.rank, share * comm.size, torch.float32, seed + number)), torch.empty(share)
        works.append(comm.reduce_scatter(out, tensor, async_op=True))
        checks.append((out, wanted(comm, share, torch.float32, "sum", seed + number)))
        other = lent(comm, values(comm.rank, share, torch.float32, seed + number + 50))
        works.append(comm.all_reduce(other, "max", async_op=True))
        checks.append((other, expected(by_node(comm), share, torch.float32, "max", seed + number + 50)))
    for number in random.Random(seed + 100 * comm.rank).sample(range(len(works)), len(works)):
        works[number].wait()
        assert works[number].done() and same_bits(*checks[number])


@pytest.mark.limit(20)
def test_a_late_rank_completes_what_the_others_started_before_other_work(placed: Any) -> None:
    comm = placed
    works, outs = [], [torch.empty(500, dtype=torch.int64) for _ in range(3)]
    tensors = [lent(comm, values(comm.rank, 500 * comm.size, torch.int64, seed)) for seed in range(3)]
    late = comm.rank == comm.size - 1
    if late:
        assert comm.all_gather_object("late")[0] == "continued"
    for out, tensor in zip(outs, tensors):
        works.append(comm.reduce_scatter(out.fill_(-1), tensor, async_op=True))
    if not late:
        assert not any(work.done() for _ in range(100) for work in works)
        assert all(out.eq(-1).all() for out in outs)
        assert comm.all_gather_object("continued")[-1] == "late"
    while not works[-1].done():
        pass
    for seed, out in enumerate(outs):
        assert works[seed].done() and same_bits(out, wanted(comm, 500, torch.int64, "sum", seed))


@pytest.mark.limit(20)
def test_blocking_calls_may_run_in_between(own: Any) -> None:
    tensor, out = lent(own, values(own.rank, 1000 * own.size, torch.float32)), torch.empty(1000)
    for seed in (1, 2, 3):
        work = own.reduce_scatter(out, tensor, async_op=True)
        other = lent(own, values(own.rank, 200, torch.float32, seed))
        own.all_reduce(other, algorithm="window")
        assert work.done(), "what was started before has ended before"
        share = own.reduce_scatter(torch.empty(1000), tensor, "max", algorithm="window")
        assert same_bits(other, expected(by_node(own), 200, torch.float32, "sum", seed))
        assert same_bits(out, wanted(own, 1000, torch.float32, "sum"))
        assert same_bits(share, wanted(own, 1000, torch.float32, "max"))


def test_one_rank_may_block_where_another_does_not(own: Any) -> None:
    tensor = lent(own, values(own.rank, 30 * own.size, torch.float32))
    out = torch.empty(60)[::2] if own.rank == 0 else torch.empty(30)
    work = own.reduce_scatter(out, tensor, async_op=True)
    assert work.done() or own.rank, "a share with other strides is copied, and has its place on return"
    work.wait()
    assert same_bits(out.contiguous(), wanted(own, 30, torch.float32, "sum"))


def test_in_other_memory_the_operation_has_completed_on_return(own: Any) -> None:
    for tensor in (values(own.rank, 4 * own.size, torch.int32), own.empty(0, torch.int32)):
        out = torch.empty(tensor.numel() // own.size, dtype=torch.int32)
        assert own.reduce_scatter(out, tensor, async_op=True).done()
        assert same_bits(out, wanted(own, out.numel(), torch.int32, "sum"))
    out = torch.empty(4, dtype=torch.int32)
    tensor = lent(own, values(own.rank, 4 * own.size, torch.int32))
    assert own.reduce_scatter(out, tensor, algorithm="ring", async_op=True).done()
    assert same_bits(out, wanted(own, 4, torch.int32, "sum"))


def test_a_share_without_references_keeps_its_memory(own: Any) -> None:
    tensor = lent(own, values(own.rank, 3000 * own.size, torch.float32))
    for _ in range(3):  # the first time the call is prepared, later it is cached
        own.barrier()
        if own.rank == 0:
            out = torch.empty(3000)
            place = out.data_ptr()
            work = own.reduce_scatter(out, tensor, async_op=True)
            del out
            others = [torch.full((3000,), 7.0) for _ in range(20)]
            assert all(other.data_ptr() != place for other in others)
            own.barrier()
            work.wait()
            assert all(other.eq(7).all() for other in others)
        else:
            own.barrier()
            own.reduce_scatter(torch.empty(3000), tensor, async_op=True).wait()


def test_the_call_is_prepared_once(comm: Any, host: FlatHostCollectives) -> None:
    size, rank = host.transport.size, host.transport.rank
    if not host.memory.exists:
        pytest.skip("no two ranks share a node")
    tensor, out = host.empty(50 * size, torch.float32), torch.empty(50)
    prepared = []
    for seed in (0, 1):
        tensor.copy_(values(rank, 50 * size, torch.float32, seed))
        host.start(CollectiveCall("reduce_scatter", tensor, out, "sum")).wait()
        prepared += host.cache.values()
        assert same_bits(out, wanted(comm, 50, torch.float32, "sum", seed))
    assert len(prepared) == 2 and prepared[0] is prepared[1]


def test_the_same_bytes_are_moved_as_by_a_blocking_call(own: Any) -> None:
    tensor, out = lent(own, values(own.rank, 64 * own.size, torch.float32)), torch.empty(64)
    with own.recording() as waited:
        own.reduce_scatter(out, tensor, algorithm=by_memory(own))
    with own.recording() as started:
        own.reduce_scatter(out, tensor, async_op=True).wait()
    assert (started.calls, started.bytes) == (waited.calls, waited.bytes)


@pytest.mark.ranks(4)
def test_window_is_refused_on_several_nodes_also_for_asynchronous_calls(nodes: Nodes) -> None:
    comm, _ = nodes
    tensor, why = comm.empty(4), "the ranks are on 2 nodes, which is what hierarchical is for"
    with pytest.raises(CommunicationError, match=why):
        comm.all_reduce(tensor, algorithm="window", async_op=True)
    with pytest.raises(CommunicationError, match=why):
        comm.reduce_scatter(tensor[:1], tensor, algorithm="window", async_op=True)
    comm.reduce_scatter(tensor[:1], tensor, algorithm="hierarchical", async_op=True).wait()
