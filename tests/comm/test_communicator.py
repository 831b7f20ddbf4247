"""Communicator, the users' object: every collective, on one rank and on several, in node memory and outside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from support.nodes import by_memory, by_node, on_nodes, one_per_node
from support.reductions import DTYPES, OPS, expected, ops_of, reduced, same_bits, values

from hpctrain.errors import CommunicationError

Nodes = tuple[Any, list[list[int]]]


@pytest.fixture(scope="module")
def own(comm: Any) -> Iterator[Any]:
    """Return a communicator of all ranks, on one node or on several."""
    own = comm.split(0)
    yield own
    own.free()


def everyone(comm: Any) -> list[list[int]]:
    return [list(range(comm.size))]


# One rank -------------------------------------------------------------------------------------------------------------


def test_one_rank_keeps_its_values(comm: Any) -> None:
    assert (comm.rank, comm.size, comm.node, comm.nodes, comm.local_rank, comm.local_size) == (0, 1, 0, 1, 0, 1)
    buffer = comm.empty(3).fill_(2)
    for op in OPS:
        for algorithm in ("auto", "window", "mpi", "direct"):
            assert comm.all_reduce(buffer, op, algorithm=algorithm) is buffer
    work = comm.all_reduce(buffer, async_op=True)
    work.wait()
    assert work.done()
    comm.broadcast(buffer)
    assert comm.reduce_scatter(torch.empty(3), buffer).tolist() == [2, 2, 2]
    share = torch.empty(3)
    assert comm.reduce_scatter(share, buffer, async_op=True).done() and share.tolist() == [2, 2, 2]
    assert comm.all_gather(torch.empty(3), buffer).tolist() == [2, 2, 2]
    assert buffer.tolist() == [2, 2, 2]


def test_one_rank_refuses_the_same_arguments_as_several(comm: Any) -> None:
    with pytest.raises(CommunicationError, match="unknown algorithm 'star'"):
        comm.all_reduce(torch.zeros(1), algorithm="star")
    with pytest.raises(CommunicationError, match="unknown reduction 'mean'"):
        comm.all_reduce(torch.zeros(1), "mean")
    with pytest.raises(CommunicationError, match="no rank to send to"):
        comm.send(torch.zeros(1), 0)


def test_a_tensor_without_memory_is_refused(comm: Any) -> None:
    for operation in (comm.all_reduce, comm.broadcast, comm.reduce):
        with pytest.raises(CommunicationError, match="cannot send a tensor on meta: allowed are .* cpu and cuda"):
            operation(torch.empty(3, device="meta"))


def test_a_copied_model_keeps_its_communicator(comm: Any) -> None:
    assert copy.deepcopy({"comm": comm})["comm"] is comm


# Reductions -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_in_ordinary_memory_are_reduced(comm: Any, dtype: torch.dtype) -> None:
    for numel, op in product((0, 1, 7, 1000), ops_of(dtype)):
        tensor = values(comm.rank, numel, dtype)
        assert comm.all_reduce(tensor, op) is tensor
        torch.testing.assert_close(tensor, expected(everyone(comm), numel, dtype, op))
        assert all(same_bits(tensor, other) for other in comm.all_gather_object(tensor))


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_algorithms_agree(own: Any, dtype: torch.dtype) -> None:
    tensor, results = own.empty(500, dtype), {}
    for op, algorithm in product(ops_of(dtype), (by_memory(own), "direct", "mpi")):
        if algorithm == "mpi" and (dtype.itemsize < 4 or (dtype.is_floating_point and op in ("min", "max"))):
            continue
        own.all_reduce(tensor.copy_(values(own.rank, 500, dtype)), op, algorithm=algorithm)
        results[op, algorithm] = tensor.clone()
    for op in ops_of(dtype):
        direct = results[op, "direct"]
        assert same_bits(direct, expected(everyone(own), 500, dtype, op)), op
        assert same_bits(results[op, by_memory(own)], expected(by_node(own), 500, dtype, op)), op
        torch.testing.assert_close(results.get((op, "mpi"), direct), direct)


@pytest.mark.ranks
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_is_preserved_in_memory_of_any_kind(own: Any, op: str) -> None:
    for tensor in (own.empty(own.size), torch.empty(own.size)):
        tensor.fill_(own.rank)[own.rank] = torch.nan
        own.all_reduce(tensor, op)
        assert tensor.isnan().all()


@pytest.mark.ranks
def test_average_of_large_numbers_does_not_overflow(own: Any) -> None:
    for tensor in (own.empty(6, torch.float16), torch.empty(6, dtype=torch.float16)):
        own.all_reduce(tensor.fill_(60000), "average")
        assert tensor.tolist() == [60000] * 6
    out = own.reduce_scatter(torch.empty(1, dtype=torch.float16), tensor[: own.size], "average")
    assert out.tolist() == [60000]


@pytest.mark.ranks
def test_strided_tensors_are_reduced_in_place(own: Any) -> None:
    for base in (torch.empty(6, 8), own.empty(48).view(6, 8)):
        base.copy_(values(own.rank, 48, torch.float32).view(6, 8))
        assert own.all_reduce(base[:, ::2]).shape == (6, 4)
        wanted = values(own.rank, 48, torch.float32).view(6, 8)
        wanted[:, ::2] = expected(everyone(own), 48, torch.float32, "sum").view(6, 8)[:, ::2]
        torch.testing.assert_close(base, wanted)


@pytest.mark.ranks
def test_a_parameter_can_be_reduced(own: Any) -> None:
    parameter = torch.nn.Parameter(torch.full((4,), float(own.rank)))
    own.all_reduce(parameter, "average")
    own.broadcast(parameter.t())
    assert parameter.tolist() == [(own.size - 1) / 2] * 4


@pytest.mark.ranks
def test_invalid_or_unsupported_calls_are_refused(own: Any) -> None:
    with pytest.raises(CommunicationError, match="unknown reduction 'mean'"):
        own.all_reduce(own.empty(4), "mean")
    with pytest.raises(CommunicationError, match="average of torch.int64 is not defined"):
        own.reduce_scatter(torch.zeros(1, dtype=torch.int64), torch.zeros(own.size, dtype=torch.int64), "average")
    with pytest.raises(CommunicationError, match="unknown algorithm 'star'"):
        own.all_reduce(own.empty(4), algorithm="star")
    why = r"it needs a tensor of comm.empty\(\)" if own.nodes == 1 else f"the ranks are on {own.nodes} nodes"
    with pytest.raises(CommunicationError, match=f"window cannot do this reduce: {why}"):
        own.reduce(torch.zeros(4), algorithm="window")
    with pytest.raises(CommunicationError, match="MPI does not reduce torch.bfloat16 by sum"):
        own.all_reduce(own.empty(4, torch.bfloat16), algorithm="mpi")


# Other operations -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_broadcast_from_any_root(own: Any) -> None:
    for root in range(own.size):
        for tensor in (torch.empty(5, 4).t(), own.empty(20).view(4, 5), torch.empty(4, 5, dtype=torch.bfloat16)):
            mine = values(own.rank, 20, tensor.dtype).view(4, 5)
            assert own.broadcast(tensor.copy_(mine), root) is tensor
            assert same_bits(tensor, values(root, 20, tensor.dtype).view(4, 5))


@pytest.mark.ranks
def test_reduce_scatter_and_all_gather_take_strided_tensors(own: Any) -> None:
    tensor = torch.empty(3, own.size).t().copy_(values(own.rank, 3 * own.size, torch.float32).view(own.size, 3))
    part = own.reduce_scatter(torch.empty(6)[::2], tensor, algorithm="direct")
    assert same_bits(part, expected(everyone(own), 3 * own.size, torch.float32, "sum").view(-1, 3)[own.rank])
    out = own.all_gather(torch.empty(3, own.size).t(), part)
    assert same_bits(out, expected(everyone(own), 3 * own.size, torch.float32, "sum").view(-1, 3))


@pytest.mark.ranks
def test_shares_of_wrong_size_are_refused(own: Any) -> None:
    whole = torch.zeros(own.size * 2)
    for share in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(CommunicationError, match=f"elements of torch.float32 are not {own.size} shares of "):
            own.all_gather(whole, share)
        with pytest.raises(CommunicationError, match=f"are not {own.size} shares of {share.numel()} elements"):
            own.reduce_scatter(share, whole)


@pytest.mark.ranks
def test_messages_are_sent_around_a_ring(own: Any) -> None:
    arrived = torch.zeros(4, 6)[:, ::2]
    for sender in range(own.size):
        receiver = (sender + 1) % own.size
        if own.rank == sender:
            own.send(values(sender, 12, torch.float32).view(3, 4).t(), receiver, tag=3)
        elif own.rank == receiver:
            assert own.recv(arrived, sender, tag=3) is arrived
    assert same_bits(arrived, values((own.rank - 1) % own.size, 12, torch.float32).view(3, 4).t())


@pytest.mark.ranks
def test_a_repeated_message_is_that_of_the_tensor_at_hand(own: Any) -> None:
    """A message is prepared once per address, size and dtype: a view with other strides begins at the same address."""
    right, left = (own.rank + 1) % own.size, (own.rank - 1) % own.size

    def around(tensor: torch.Tensor, tag: int = 0) -> torch.Tensor:
        received = torch.full_like(tensor, -1).contiguous()
        if own.rank % 2:
            own.recv(received, left, tag)
            own.send(tensor, right, tag)
        else:
            own.send(tensor, right, tag)
            own.recv(received, left, tag)
        return received

    square = torch.arange(9.0).view(3, 3)
    with own.recording() as recorder:
        for number in range(3):
            square += 1 + own.rank
            others = torch.arange(9.0).view(3, 3) + (number + 1) * (1 + left)
            assert torch.equal(around(square), others)
            assert torch.equal(around(square.T), others.T)
            assert torch.equal(around(square, tag=1), others)
            assert torch.equal(around(square.view(torch.int32)), others.view(torch.int32))
    assert recorder.calls["send"] == recorder.calls["recv"] == 12 and recorder.bytes["send"] == 12 * 36
    for call in (own.send, own.recv):
        with pytest.raises(CommunicationError, match="rank 99 is not in"):
            call(square, 99)
        with pytest.raises(CommunicationError, match="tag -1 is not in"):
            call(square, right, -1)


@pytest.mark.ranks
def test_split_makes_a_communicator_with_its_own_memory(own: Any) -> None:
    part = own.split(own.rank % 2)
    ranks = [rank for rank in range(own.size) if rank % 2 == own.rank % 2]
    assert (part.size, part.rank) == (len(ranks), ranks.index(own.rank))
    tensor = part.empty(100).copy_(values(own.rank, 100, torch.float32))
    part.all_reduce(tensor)
    assert same_bits(tensor, reduced([values(rank, 100, torch.float32) for rank in ranks], "sum"))
    backwards = own.split(0, key=-own.rank)
    assert backwards.rank == own.size - 1 - own.rank
    for made in (part, backwards):
        made.free()


@pytest.mark.ranks
def test_split_communicators_are_freed_with_their_parent(comm: Any) -> None:
    """MPI libraries run out of communicators."""
    from mpi4py import MPI

    whole = comm.split(0)
    early, late = whole.split(0), whole.split(whole.rank % 2)
    mesh = whole.mesh(tensor=whole.size)
    for part in (early, late):
        part.empty(10)
    inner = late.split(0)
    early.free()
    whole.free()
    whole.free()
    assert all(part.transport.comm == MPI.COMM_NULL for part in (whole, early, late, inner, mesh.data, mesh.pipe))


# Memory and counts ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_empty_returns_contiguous_memory_of_the_node(own: Any) -> None:
    for numel in (0, 1, 1000, 2**18):
        for dtype in (torch.float64, torch.bfloat16, torch.uint8):
            tensor = own.empty(numel, dtype)
            assert tensor.shape == (numel,) and tensor.dtype is dtype and tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
            own.all_reduce(tensor, algorithm=by_memory(own))


@pytest.mark.ranks
def test_recording_counts_memory_allocated_meanwhile(comm: Any) -> None:
    fresh = comm.split(comm.node)
    with fresh.recording() as outer:
        tensor = fresh.empty(32 * fresh.size)
        fresh.all_reduce(tensor, algorithm="window")
        with fresh.recording() as inner:
            fresh.all_reduce(tensor, algorithm="window")
            fresh.all_reduce(torch.zeros(5))
            fresh.broadcast(tensor, algorithm="mpi")
        fresh.all_reduce(tensor, algorithm="window")
    fresh.all_reduce(tensor, algorithm="window")
    each = 4 * 32 * (fresh.size - 1)
    assert outer.calls == {"window": 2} and outer.bytes == {"window": 2 * each}
    assert inner.calls == {"window": 1, "all_reduce": 1, "broadcast": 1}
    assert inner.bytes == {"window": each, "all_reduce": 20, "broadcast": 4 * 32 * fresh.size}
    fresh.free()


# Several nodes --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_nodes_of_unequal_size_share_no_memory_and_reduce_by_messages(nodes: Nodes) -> None:
    spread, ranks = nodes
    assert not spread.shares_memory and sorted(map(len, ranks)) == [1, 2]
    for dtype, op in product(DTYPES, ("sum", "max")):
        tensor = spread.empty(100, dtype).copy_(values(spread.rank, 100, dtype))
        work = spread.all_reduce(tensor, op, async_op=True)
        work.wait()
        torch.testing.assert_close(tensor, expected(everyone(spread), 100, dtype, op))
    with pytest.raises(CommunicationError, match="the nodes hold unequal numbers of ranks"):
        spread.all_reduce(tensor, algorithm="window")


@pytest.mark.ranks
def test_nodes_of_one_rank_share_no_memory_and_reduce_by_messages(comm: Any) -> None:
    spread = on_nodes(comm, one_per_node)
    assert not spread.shares_memory and spread.uniform and spread.nodes == comm.size
    tensor = spread.empty(100, torch.bfloat16).copy_(values(comm.rank, 100, torch.bfloat16))
    spread.all_reduce(tensor)
    assert same_bits(tensor, expected(everyone(comm), 100, torch.bfloat16, "sum"))
    spread.free()
