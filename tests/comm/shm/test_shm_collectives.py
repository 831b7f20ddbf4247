"""Collectives through node memory, in place and staged, on one node and on two: compared with torch."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy
import pytest
import torch
from support.reductions import DTYPES, expected, ops_of, same_bits, values

from hpctrain.comm.reduction import BLOCK, Reducer
from hpctrain.comm.shm import staged
from hpctrain.comm.shm.collectives import NodeCollectives
from hpctrain.comm.shm.memory import discover
from hpctrain.errors import CommunicationError

Nodes = tuple[Any, list[list[int]]]
LENGTHS = (1, 3, 17, 64, 1000)
LONG = (BLOCK + 7, staged.SLOT // 4 * 3 + 11)

pytestmark = pytest.mark.ranks


def everyone(comm: Any) -> list[list[int]]:
    return [list(range(comm.size))]


def lent(comm: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in node memory."""
    return comm.empty(tensor.numel(), tensor.dtype).copy_(tensor)


# In place -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter(own: Any, dtype: torch.dtype) -> None:
    for numel, op in product(LENGTHS, ops_of(dtype)):
        tensor = lent(own, values(own.rank, numel * own.size, dtype))
        out = own.reduce_scatter(torch.empty(numel, dtype=dtype), tensor, op, algorithm="window")
        whole = expected(everyone(own), numel * own.size, dtype, op)
        assert same_bits(out, whole[own.rank * numel :][:numel]), (numel, op)
        assert same_bits(tensor, values(own.rank, numel * own.size, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_all_gather_from_memory_of_any_kind(own: Any, dtype: torch.dtype) -> None:
    for numel in (*LENGTHS, *LONG):
        whole = torch.cat([values(rank, numel, dtype) for rank in range(own.size)])
        out = own.empty(numel * own.size, dtype)
        for tensor in (values(own.rank, numel, dtype), lent(own, values(own.rank, numel, dtype))):
            assert own.all_gather(out.zero_(), tensor, algorithm="window") is out
            assert same_bits(out, whole)
        place = out.zero_().chunk(own.size)[own.rank].copy_(values(own.rank, numel, dtype))
        assert same_bits(own.all_gather(out, place, algorithm="window"), whole)


def test_broadcast_from_every_root(own: Any) -> None:
    for root, numel, dtype in product(range(own.size), (*LENGTHS, *LONG), (torch.float32, torch.int8)):
        tensor = lent(own, values(own.rank, numel, dtype))
        own.broadcast(tensor, root, algorithm="window")
        assert same_bits(tensor, values(root, numel, dtype)), (root, numel)


def test_reduce_leaves_the_tensors_of_other_ranks_unchanged(own: Any) -> None:
    for root, op in product(range(own.size), ("sum", "average", "max")):
        tensor = lent(own, values(own.rank, LONG[0], torch.float32))
        own.reduce(tensor, op, root, algorithm="window")
        mine = values(own.rank, LONG[0], torch.float32)
        assert same_bits(tensor, expected(everyone(own), LONG[0], torch.float32, op) if own.rank == root else mine)


# Common memory --------------------------------------------------------------------------------------------------------


def test_common_memory_is_shared_by_all_ranks(own: Any) -> None:
    whole = own.common(own.size * 5)
    assert whole.shape == (own.size * 5,) and whole.eq(0).all()
    own.barrier()
    whole.chunk(own.size)[own.rank].fill_(own.rank + 1)
    own.barrier()
    assert whole.view(own.size, 5)[:, 0].tolist() == [rank + 1 for rank in range(own.size)]


def test_all_gather_in_common_memory_copies_nothing(own: Any) -> None:
    whole = own.common(own.size * 1000)
    own.barrier()
    place = whole.chunk(own.size)[own.rank].copy_(values(own.rank, 1000, torch.float32))
    with own.recording() as recorder:
        assert own.all_gather(whole, place) is whole
        assert same_bits(whole, torch.cat([values(rank, 1000, torch.float32) for rank in range(own.size)]))
    assert not recorder.bytes
    own.barrier()
    own.all_gather(whole, values(own.size - own.rank, 1000, torch.float32))
    assert same_bits(whole, torch.cat([values(own.size - rank, 1000, torch.float32) for rank in range(own.size)]))


# Staged ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_staged_all_reduce(own: Any, dtype: torch.dtype) -> None:
    for numel, op in (*product(LENGTHS, ops_of(dtype)), *((numel, "sum") for numel in LONG)):
        tensor = values(own.rank, numel, dtype)
        own.all_reduce(tensor, op, algorithm="window")
        assert same_bits(tensor, expected(everyone(own), numel, dtype, op)), (numel, op)


def test_staged_operations_follow_each_other(own: Any) -> None:
    # Consecutive operations without a barrier: none may fill a slot that another rank still reads.
    for turn, numel in product(range(4), (5, LONG[1])):
        tensor = values(own.rank, numel, torch.float32, turn)
        own.all_reduce(tensor, algorithm="window")
        assert same_bits(tensor, expected(everyone(own), numel, torch.float32, "sum", turn))
        mine, gathered = values(own.rank, numel, torch.float32, turn), torch.empty(numel * own.size)
        own.all_gather(gathered, mine, algorithm="window")
        wanted = [values(rank, numel, torch.float32, turn) for rank in range(own.size)]
        assert same_bits(gathered, torch.cat(wanted))
        share = own.reduce_scatter(torch.empty(numel), gathered, "max", algorithm="window")
        assert same_bits(share, wanted[own.rank])
        own.broadcast(mine, turn % own.size, algorithm="window")
        assert same_bits(mine, wanted[turn % own.size])


def test_staged_operations_wait_for_operations_in_flight(own: Any) -> None:
    first = lent(own, values(own.rank, 1000, torch.float32))
    work = own.all_reduce(first, async_op=True)
    second = values(own.rank, 1000, torch.float32, 1)
    own.all_reduce(second, algorithm="window")
    assert work.done()
    assert same_bits(first, expected(everyone(own), 1000, torch.float32, "sum"))
    assert same_bits(second, expected(everyone(own), 1000, torch.float32, "sum", 1))


# On two nodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_hierarchical_data_movement_on_two_nodes(nodes: Nodes) -> None:
    comm, _ = nodes
    for numel, dtype in product((*LENGTHS, LONG[1]), (torch.float32, torch.bfloat16)):
        whole = torch.cat([values(rank, numel, dtype) for rank in range(comm.size)])
        out, mine = comm.empty(whole.numel(), dtype), values(comm.rank, numel, dtype)
        assert same_bits(comm.all_gather(out, mine, algorithm="hierarchical"), whole)
        common = comm.common(whole.numel(), dtype)
        comm.barrier()
        assert same_bits(comm.all_gather(common, common.chunk(comm.size)[comm.rank].copy_(mine)), whole)
        for root in range(comm.size):
            tensor = lent(comm, mine)
            assert same_bits(comm.broadcast(tensor, root, algorithm="hierarchical"), values(root, numel, dtype))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hierarchical_reductions_on_two_nodes(nodes: Nodes, dtype: torch.dtype) -> None:
    comm, ranks = nodes
    for numel, op in (*product((1, 17, 1000), ops_of(dtype)), (LONG[1], "sum")):
        mine, wanted = values(comm.rank, numel * comm.size, dtype), expected(ranks, numel * comm.size, dtype, op)
        out = torch.empty(numel, dtype=dtype)
        share = comm.reduce_scatter(out, lent(comm, mine), op, algorithm="hierarchical")
        assert same_bits(share, wanted[comm.rank * numel :][:numel]), (numel, op)
        assert same_bits(comm.all_reduce(mine, op, algorithm="hierarchical"), wanted), (numel, op)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("few_nodes, piece", [(8, 4096), (1, 2**19)])
def test_segments_of_a_long_slice_are_in_flight_in_turn(nodes: Nodes, few_nodes: int, piece: int) -> None:
    comm, ranks = nodes
    node = comm.transport.split_node()
    topology, reducer = discover(comm.transport, node), Reducer()
    collectives = NodeCollectives(comm.transport, node, topology, reducer, few_nodes=few_nodes, piece=piece)
    tensors = [collectives.empty(numel, torch.float32) for numel in (30011, 20000)]
    works = []
    for seed, (tensor, op) in enumerate(zip(tensors, ("sum", "average"))):
        tensor.copy_(values(comm.rank, tensor.numel(), torch.float32, seed))
        works.append(collectives.prepare_start("all_reduce", tensor, (tensor, op))())
    works[1].wait()
    works[0].wait()
    for seed, (tensor, op) in enumerate(zip(tensors, ("sum", "average"))):
        torch.testing.assert_close(tensor, expected(ranks, tensor.numel(), torch.float32, op, seed))
        assert all(same_bits(tensor, theirs) for theirs in comm.all_gather_object(tensor.clone()))
    collectives.free()
    node.free()


@pytest.mark.ranks(4)
def test_window_is_refused_on_several_nodes(nodes: Nodes) -> None:
    with pytest.raises(CommunicationError, match="the ranks are on 2 nodes, which is what hierarchical is for"):
        nodes[0].all_reduce(nodes[0].empty(4), algorithm="window")
    with pytest.raises(CommunicationError, match=r"cannot do this broadcast: it needs a tensor of comm.empty"):
        nodes[0].broadcast(torch.zeros(4), algorithm="hierarchical")


# Cached calls ---------------------------------------------------------------------------------------------------------


def test_a_cached_call_serves_the_next_tensor_at_the_same_address(own: Any) -> None:
    own.all_reduce(torch.ones(4), algorithm="window")
    memory = numpy.empty(300, dtype=numpy.float32)  # the allocator may give each tensor another address
    for turn in range(50):
        tensor = torch.from_numpy(memory).fill_(float(turn))
        assert tensor.data_ptr() == memory.ctypes.data
        own.all_reduce(tensor)
        own.all_reduce(tensor, "max", algorithm="window")
        assert tensor.eq(turn * own.size).all()
        del tensor


def test_strided_tensors_do_not_hit_the_cache_of_contiguous_ones(own: Any) -> None:
    base = own.empty(36).view(6, 6).copy_(values(own.rank, 36, torch.float32).view(6, 6))
    wanted = expected(everyone(own), 36, torch.float32, "sum").view(6, 6)
    torch.testing.assert_close(own.all_reduce(base[:3]).clone(), wanted[:3])
    base.copy_(values(own.rank, 36, torch.float32).view(6, 6))
    own.all_reduce(base[:, :3])
    torch.testing.assert_close(base[:, :3], wanted[:, :3])
    assert same_bits(base[:, 3:], values(own.rank, 36, torch.float32).view(6, 6)[:, 3:])
