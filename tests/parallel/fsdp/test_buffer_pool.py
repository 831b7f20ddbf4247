"""Buffer pools for gradients: a ring in node memory, or fresh memory, for a limited number of groups at once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.parallel.buckets import ring_slots
from hpctrain.parallel.fsdp.reduce import FreshPool, RingPool

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
    pool, comm = ring_of(640)
    for sizes in ([64, 128], [320, 320, 640]):
        pool.set_sizes(sizes)
        for number in range(len(sizes)):
            pool.buffer(number)
    assert comm.asked == [(640, torch.uint8)]


def test_a_ring_gives_parts_of_its_memory() -> None:
    pool, comm = ring_of(100)
    pool.set_sizes([30, 50, 40, 20])
    for number in range(4):
        pool.buffer(number).fill_(number + 1)
    # The third began at 0 again, the fourth follows it: 0..39 are 3, 40..59 are 4, the rest of the second follows.
    assert comm.given.tolist() == [3] * 40 + [4] * 20 + [2] * 20 + [0] * 20
    assert [pool.groups_before(number) for number in range(4)] == [0, 0, 2, 2]
    assert [pool.buffer(number).numel() for number in range(4)] == [30, 50, 40, 20]


def test_another_order_gives_other_offsets() -> None:
    pool, _ = ring_of(96)
    pool.set_sizes([64, 32, 96])
    assert [pool.groups_before(number) for number in range(3)] == [0, 0, 2]
    pool.set_sizes([96, 64, 32])
    assert [pool.groups_before(number) for number in range(3)] == [0, 1, 1]
    assert [pool.buffer(number).numel() for number in range(3)] == [96, 64, 32]


def test_groups_that_are_open_together_do_not_overlap() -> None:
    draw = random.Random(3)
    for _ in range(20):
        check_together(draw, [draw.randrange(1, 50) for _ in range(20)])


def check_together(draw: random.Random, sizes: list[int]) -> None:
    pool, _ = ring_of(max(sizes) + draw.randrange(100))
    pool.set_sizes(sizes)
    for number in range(20):
        for other in range(number + 1, 20):
            if pool.groups_before(other) <= number:  # that is, before this one is done
                pool.buffer(number).fill_(1)
                pool.buffer(other).fill_(2)
                assert bool((pool.buffer(number) == 1).all()), (number, other)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_fresh_memory_is_limited_to_a_number_of_groups(limit: int) -> None:
    pool = FreshPool(CPU, limit)
    sizes = [64, 128, 192, 64, 64, 320]
    pool.set_sizes(sizes)
    assert [pool.groups_before(number) for number in range(6)] == [max(0, number - limit + 1) for number in range(6)]
    opened = [pool.buffer(number) for number in range(6)]
    assert [(each.numel(), each.dtype, each.device) for each in opened] == [(size, torch.uint8, CPU) for size in sizes]
    assert len({each.data_ptr() for each in opened}) == 6


def test_fresh_memory_is_on_the_device() -> None:
    pool = FreshPool(torch.device("meta"), 2)
    pool.set_sizes([64])
    assert pool.buffer(0).is_meta


# Slots in a ring ------------------------------------------------------------------------------------------------------


def rings() -> Iterator[tuple[list[int], int]]:
    """Yield sizes and capacities: some, and many random ones."""
    yield from [([5], 5), ([5, 5, 5], 5), ([3, 3, 3, 3, 3], 7), ([4, 1, 1, 4, 2], 6), ([1] * 9, 4)]
    draw = random.Random(7)
    for _ in range(200):
        sizes = [draw.randrange(1, draw.choice((3, 20, 60))) for _ in range(draw.randrange(1, 25))]
        yield sizes, max(sizes) + draw.randrange(draw.choice((1, 40, 400)))


def overlapping(offset: int, size: int, other: int, length: int) -> bool:
    return bool(set(range(offset, offset + size)) & set(range(other, other + length)))


def test_an_offset_is_free_when_the_tensors_before_it_are_done() -> None:
    for sizes, capacity in rings():
        slots = ring_slots(sizes, capacity)
        assert len(slots) == len(sizes)
        last = 0
        for number, (slot, size) in enumerate(zip(slots, sizes)):
            assert 0 <= slot.offset and slot.offset + size <= capacity
            # The wait is minimal, except for tensors that the previous one waits for: they are done in order.
            below = [k + 1 for k in range(number) if overlapping(slot.offset, size, slots[k].offset, sizes[k])]
            last = max([last, *below])
            assert slot.after == last <= number, (sizes, capacity, number)


def test_writers_may_run_in_any_order_and_readers_in_sequence() -> None:
    draw = random.Random(11)
    for sizes, capacity in rings():
        play(sizes, capacity, draw)


def play(sizes: list[int], capacity: int, draw: random.Random) -> None:
    """Write tensors whenever there is space; read and release them one after the other."""
    slots, memory = ring_slots(sizes, capacity), np.full(capacity, -1)
    parts = [memory[slot.offset : slot.offset + size] for slot, size in zip(slots, sizes)]
    done, written = 0, set[int]()
    while done < len(sizes):
        free = [k for k in range(done, len(sizes)) if k not in written and slots[k].after <= done]
        if done in written and (not free or draw.random() < 0.4):
            assert (parts[done] == done).all(), f"{done} was overwritten"
            parts[done][:] = -1
            done += 1
            continue
        assert free, "no writer can continue"
        chosen = draw.choice(free)
        assert (parts[chosen] == -1).all(), f"{chosen} is written where {set(parts[chosen])} is still stored"
        parts[chosen][:] = chosen
        written.add(chosen)


def waits(sizes: Sequence[int], capacity: int) -> list[int]:
    return [slot.after for slot in ring_slots(sizes, capacity)]


def test_a_ring_with_space_for_all_never_waits() -> None:
    assert waits([3, 9, 1, 4], 17) == [0, 0, 0, 0]
    assert [slot.offset for slot in ring_slots([3, 9, 1, 4], 17)] == [0, 3, 12, 13]


def test_as_many_tensors_as_fit_are_held_together() -> None:
    assert waits([2] * 7, 6) == [0, 0, 0, 1, 2, 3, 4]
    assert waits([6, 2, 2, 2, 6], 6) == [0, 1, 1, 1, 4]
    assert waits([5, 4, 5], 5) == [0, 1, 2]
    assert ring_slots([], 4) == []
