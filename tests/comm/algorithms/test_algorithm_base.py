"""Algorithms as sequences of steps, and the threads that replace ranks in their tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.threads import ThreadTransport, ThreadWorld

from hpctrain.comm.algorithms.base import TAG, Algorithm, copy_unless_same, cut, exchange, offsets
from hpctrain.comm.transport.base import TAGS, Finished, Transport, Work
from hpctrain.comm.transport.waiting import waiting


@Algorithm
def swap(transport: Transport, tensor: torch.Tensor) -> Iterator[Work]:
    """Exchange tensors of two ranks."""
    arrived = torch.empty_like(tensor)
    yield from exchange(transport, tensor, 1 - transport.rank, arrived, 1 - transport.rank)
    tensor.copy_(arrived)


def test_call_blocks_and_start_does_not() -> None:
    def body(transport: ThreadTransport) -> list[float]:
        first, second = torch.tensor([float(transport.rank)]), torch.tensor([10.0 + transport.rank])
        swap(transport, first)
        if transport.rank == 0:
            transport.barrier()
        work = swap.start(transport, second)
        if transport.rank:
            assert not work.done()
            transport.barrier()
        work.wait()
        assert work.done()
        return [first.item(), second.item()]

    assert ThreadWorld(2).run(body) == [[1, 11], [0, 10]]
    assert swap.__doc__ == "Exchange tensors of two ranks." and swap.__name__ == "swap"


def test_waiting_names_the_collective() -> None:
    seen: list[str] = []

    class Slow(Finished):
        def wait(self) -> None:
            seen.append(waiting.operation)

    @Algorithm
    def all_reduce() -> Iterator[Work]:
        yield Slow()

    all_reduce()
    assert seen == ["all_reduce"] and waiting.operation == ""


def test_tags_of_collectives_are_within_the_transports_range() -> None:
    assert TAG - 1 > 0 and TAG < TAGS


@pytest.mark.parametrize(
    "nbytes, lengths", [(8, [2] * 5), (12, [3, 3, 2, 2]), (1, [1] * 10), (40, [10]), (10**9, [10])]
)
def test_cut_returns_slices_of_nearly_equal_length(nbytes: int, lengths: list[int]) -> None:
    assert [len(piece) for piece in cut(torch.arange(10), nbytes, 4)] == lengths
    assert torch.equal(torch.cat(list(cut(torch.arange(10), nbytes, 4))), torch.arange(10))
    assert [len(piece) for piece in cut(torch.empty(0), nbytes, 4)] == [0]


def test_offsets_are_prefix_sums_and_place_copies_once() -> None:
    assert offsets([3, 0, 2]) == [0, 3, 3, 5]
    out = torch.zeros(4)
    copy_unless_same(out[2:], torch.ones(2))
    copy_unless_same(out[:2], out[:2])
    assert out.tolist() == [0, 0, 1, 1]


# Threads as ranks: they must detect errors that MPI does not report --------------------------------------------------


def changed(transport: ThreadTransport) -> None:
    tensor = torch.zeros(3)
    if transport.rank:
        transport.recv(tensor, 0)
    else:
        work = transport.isend(tensor, 1)
        tensor.add_(1)
        work.wait()


def forgotten(transport: ThreadTransport) -> None:
    if transport.rank == 0:
        transport.isend(torch.zeros(1), 1)


def careless(transport: ThreadTransport) -> None:
    transport.irecv(torch.zeros(1), 0) if transport.rank else transport.send(torch.zeros(1), 1)


def short(transport: ThreadTransport) -> None:
    transport.recv(torch.zeros(1), 0) if transport.rank else transport.send(torch.zeros(2), 1)


def failed(transport: ThreadTransport) -> None:
    if transport.rank == 0:
        raise ValueError("lost")
    transport.recv(torch.zeros(1), 0)


@pytest.mark.parametrize(
    "body, message",
    [
        (changed, "memory changed while it was sent"),
        (forgotten, "never received"),
        (careless, "never waited for"),
        (short, "8 bytes for a place of 4"),
        (failed, "^lost$"),
    ],
)
def test_threads_detect_errors_and_end_together(body: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        ThreadWorld(3 if body is failed else 2).run(body)


def test_threads_fill_a_receive_buffer_with_garbage_until_the_wait() -> None:
    def body(transport: ThreadTransport) -> None:
        tensor = torch.zeros(1, dtype=torch.uint8)
        if transport.rank == 0:
            transport.send(tensor, 1)
        else:
            work = transport.irecv(tensor, 0)
            while not tensor.is_nonzero():  # garbage, not the zero that was sent
                pass
            work.wait()
            assert not tensor.is_nonzero()

    ThreadWorld(2).run(body)


def test_the_clock_serializes_sends_and_receives_of_a_rank() -> None:
    def to_one(transport: ThreadTransport) -> None:
        if transport.rank:
            transport.send(torch.zeros(transport.rank, dtype=torch.uint8), 0)
        else:
            works = [transport.irecv(torch.zeros(rank, dtype=torch.uint8), rank) for rank in (1, 2, 3)]
            for work in works:
                work.wait()

    def from_one(transport: ThreadTransport) -> None:
        if transport.rank:
            transport.recv(torch.zeros(1, dtype=torch.uint8), 0)
        else:
            for work in [transport.isend(torch.zeros(1, dtype=torch.uint8), rank) for rank in (1, 2, 3)]:
                work.wait()

    for body, alpha, beta, elapsed in ((to_one, 10, 1, 36), (from_one, 10, 0, 30), (from_one, 0, 5, 15)):
        world = ThreadWorld(4, alpha, beta)
        world.run(body)
        assert world.elapsed == elapsed


def test_threads_split_and_exchange_objects() -> None:
    def body(transport: ThreadTransport) -> None:
        part = transport.split(transport.rank % 2, -transport.rank)
        alike = [rank for rank in reversed(range(transport.size)) if rank % 2 == transport.rank % 2]
        assert (part.size, part.rank) == (len(alike), alike.index(transport.rank))
        assert part.all_gather_object(transport.rank) == alike
        assert transport.broadcast_object(transport.rank, 2) == 2
        assert transport.split_node().size == 1

    ThreadWorld(5).run(body)
