"""Memory of gradients: a ring in node memory, or fresh memory, for a limited number of pieces at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.parallel.fsdp.buffer_pool import FreshPool, RingPool

CPU = torch.device("cpu")


class FakeMemory:
    """Communicator that provides memory and records the requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, torch.dtype]] = []
        self.given = torch.empty(0)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.asked.append((numel, dtype))
        self.given = torch.zeros(numel, dtype=dtype)
        return self.given


def ring_of(capacity: int) -> tuple[RingPool, FakeMemory]:
    comm: Any = FakeMemory()
    return RingPool(comm, capacity), comm


def test_a_ring_requests_its_whole_memory_once() -> None:
    room, comm = ring_of(640)
    for sizes in ([64, 128], [320, 320, 640]):
        room.set_sizes(sizes)
        for number in range(len(sizes)):
            room.buffer(number)
    assert comm.asked == [(640, torch.uint8)]


def test_a_ring_gives_parts_of_its_memory() -> None:
    room, comm = ring_of(100)
    room.set_sizes([30, 50, 40, 20])
    for number in range(4):
        room.buffer(number).fill_(number + 1)
    # The third began at 0 again, the fourth follows it: 0..39 are 3, 40..59 are 4, the rest of the second follows.
    assert comm.given.tolist() == [3] * 40 + [4] * 20 + [2] * 20 + [0] * 20
    assert [room.groups_before(number) for number in range(4)] == [0, 0, 2, 2]
    assert [room.buffer(number).numel() for number in range(4)] == [30, 50, 40, 20]


def test_another_order_gives_other_offsets() -> None:
    room, _ = ring_of(96)
    room.set_sizes([64, 32, 96])
    assert [room.groups_before(number) for number in range(3)] == [0, 0, 2]
    room.set_sizes([96, 64, 32])
    assert [room.groups_before(number) for number in range(3)] == [0, 1, 1]
    assert [room.buffer(number).numel() for number in range(3)] == [96, 64, 32]


def test_pieces_that_are_open_together_do_not_overlap() -> None:
    draw = random.Random(3)
    for _ in range(20):
        check_together(draw, [draw.randrange(1, 50) for _ in range(20)])


def check_together(draw: random.Random, sizes: list[int]) -> None:
    room, _ = ring_of(max(sizes) + draw.randrange(100))
    room.set_sizes(sizes)
    for number in range(20):
        for other in range(number + 1, 20):
            if room.groups_before(other) <= number:  # that is, before this one is done
                room.buffer(number).fill_(1)
                room.buffer(other).fill_(2)
                assert bool((room.buffer(number) == 1).all()), (number, other)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_fresh_memory_is_limited_to_a_number_of_pieces(limit: int) -> None:
    room = FreshPool(CPU, limit)
    sizes = [64, 128, 192, 64, 64, 320]
    room.set_sizes(sizes)
    assert [room.groups_before(number) for number in range(6)] == [max(0, number - limit + 1) for number in range(6)]
    opened = [room.buffer(number) for number in range(6)]
    assert [(each.numel(), each.dtype, each.device) for each in opened] == [(size, torch.uint8, CPU) for size in sizes]
    assert len({each.data_ptr() for each in opened}) == 6


def test_fresh_memory_is_on_the_device() -> None:
    room = FreshPool(torch.device("meta"), 2)
    room.set_sizes([64])
    assert room.buffer(0).is_meta
