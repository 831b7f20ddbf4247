"""Reductions in node memory: bitwise equal to NumPy's in rank order, on one node and on two."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from support.reductions import DTYPES, expected, ops_of, same_bits, values

from hpctrain.comm.prepared import PreparedCallCache
from hpctrain.comm.reduction import BLOCK

SHORT = (0, 1, 7, 63, 64, 65, 1000)
LONG = (BLOCK - 1, BLOCK + 1, 3 * BLOCK + 17, 9 * BLOCK + 5)
LONG_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.uint8)
Nodes = tuple[Any, list[list[int]]]
ROOM = 8 * (max(LONG) + 64)


@pytest.fixture(scope="module")
def room(own: Any) -> torch.Tensor:
    """Return enough bytes for the longest tensor of the widest type, at an offset."""
    return own.empty(ROOM, torch.uint8)


def put(room: torch.Tensor, tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Return a copy of a tensor inside the room, ``offset`` elements from its start."""
    start, end = offset * tensor.itemsize, (offset + tensor.numel()) * tensor.itemsize
    return room[start:end].view(tensor.dtype).copy_(tensor)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduces_in_rank_order(own: Any, room: torch.Tensor, dtype: torch.dtype) -> None:
    for numel, op in product(SHORT, ops_of(dtype)):
        tensor = put(room, values(own.rank, numel, dtype))
        assert own.all_reduce(tensor, op, algorithm="window") is tensor
        assert same_bits(tensor, expected([list(range(own.size))], numel, dtype, op)), (numel, op)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", LONG_DTYPES, ids=str)
def test_blocking_does_not_change_the_result(own: Any, room: torch.Tensor, dtype: torch.dtype) -> None:
    for numel in LONG:
        tensor = put(room, values(own.rank, numel, dtype))
        own.all_reduce(tensor, algorithm="window")
        assert same_bits(tensor, expected([list(range(own.size))], numel, dtype, "sum")), numel


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduces_within_the_nodes_and_then_across(nodes: Nodes, dtype: torch.dtype) -> None:
    spread, ranks = nodes
    assert spread.shares_memory
    for numel, op in [*product(SHORT, ops_of(dtype)), (LONG[1], "sum")]:
        tensor = spread.empty(numel, dtype).copy_(values(spread.rank, numel, dtype))
        spread.all_reduce(tensor, op, algorithm="hierarchical")
        assert same_bits(tensor, expected(ranks, numel, dtype, op)), (numel, op)


@pytest.mark.ranks
@pytest.mark.parametrize("offset", [1, 5, 31, 64])
def test_reduces_a_slice_and_leaves_the_rest(own: Any, room: torch.Tensor, offset: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        whole = put(room, values(own.rank, 3000, dtype))
        own.all_reduce(whole[offset : offset + 1000], "sum", algorithm="window")
        mine = values(own.rank, 3000, dtype)
        mine[offset : offset + 1000] = expected([list(range(own.size))], 3000, dtype, "sum")[offset : offset + 1000]
        assert same_bits(whole, mine)


def mixed(comm: Any, room: torch.Tensor, ranks: list[list[int]], impatient: bool) -> None:
    """Start reductions, and call every other kind of collective before they end."""
    first = put(room, values(comm.rank, 4000, torch.float32))
    second = put(room, values(comm.rank, 4000, torch.float32, seed=1), 4000)
    works = [comm.all_reduce(first, async_op=True)]
    polls = 300 if impatient else 0
    for _ in range(polls):
        works[0].done()
    comm.barrier()
    works.append(comm.all_reduce(second, async_op=True))
    for _ in range(polls):
        works[1].done()
    plain = values(comm.rank, 50, torch.int64)
    comm.all_reduce(plain, "max")
    comm.broadcast(plain)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))
    half = values(comm.rank, 50, torch.float16)
    comm.all_reduce(half)
    works[1].wait()
    works[0].wait()
    assert same_bits(first, expected(ranks, 4000, torch.float32, "sum"))
    assert same_bits(second, expected(ranks, 4000, torch.float32, "sum", seed=1))
    everyone = [list(range(comm.size))]
    assert same_bits(plain, expected(everyone, 50, torch.int64, "max"))
    assert same_bits(half, expected(everyone, 50, torch.float16, "sum"))


@pytest.mark.ranks
@pytest.mark.limit(20)
def test_other_collectives_may_run_during_a_reduction(own: Any, room: torch.Tensor) -> None:
    for turn in range(4):
        mixed(own, room, [list(range(own.size))], impatient=own.rank % 2 == turn % 2)


@pytest.mark.ranks(4)
@pytest.mark.limit(20)
def test_other_collectives_may_run_during_a_reduction_on_two_nodes(nodes: Nodes) -> None:
    # A node whose ranks poll the reduction and a node whose ranks do not still meet in a barrier.
    spread, ranks = nodes
    room = spread.empty(8 * 4000, torch.float32).view(torch.uint8)
    for node in (0, 1):
        mixed(spread, room, ranks, impatient=spread.node == node)


@pytest.mark.ranks(4)
def test_average_over_two_nodes_does_not_overflow(nodes: Nodes) -> None:
    tensor = nodes[0].empty(100, torch.float16).fill_(60000)
    nodes[0].all_reduce(tensor, "average")
    assert tensor.eq(60000).all()


@pytest.mark.ranks
def test_bytes_written_for_other_ranks_are_counted(own: Any, room: torch.Tensor) -> None:
    numel = 160 * own.size
    with own.recording() as recorder:
        for dtype in (torch.float32, torch.bfloat16):
            own.all_reduce(put(room, values(own.rank, numel, dtype)), algorithm="window")
    assert recorder.calls == {"window": 2}
    assert recorder.bytes == {"window": (own.size - 1) * 160 * (4 + 2)}


@pytest.mark.ranks(4)
def test_bytes_on_two_nodes_are_those_within_the_node_and_of_the_slices_across(nodes: Nodes) -> None:
    spread, _ = nodes
    tensor = spread.empty(640).fill_(1)
    with spread.recording() as recorder:
        spread.all_reduce(tensor, algorithm="hierarchical")
    # Half of the tensor belongs to this rank: that half is sent to one neighbour.
    # Half of it is sent in each direction across the nodes.
    assert recorder.calls == {"window": 1, "send": 2, "recv": 2}
    assert recorder.bytes == {"window": 4 * 320, "send": 2 * 4 * 160, "recv": 2 * 4 * 160}


def test_the_cache_of_calls_never_exceeds_its_limit() -> None:
    cache = PreparedCallCache(limit=5)
    for number in range(12):
        cache[number] = lambda: number
        assert len(cache) <= 5 and number in cache
