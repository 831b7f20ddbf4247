"""Slots in a ring buffer: tensors that are held together do not overlap, and waits are minimal."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from hpctrain.parallel.buckets import ring_slots


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
