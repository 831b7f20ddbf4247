"""Flat layouts, compared with NumPy's split of the same memory; offsets in a ring, compared with a simulation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hpctrain.parallel.fsdp.buffer_pool import ring_slots
from hpctrain.parallel.fsdp.param_group import ALIGN, FlatLayout, HeldRange, lay_out

Case = tuple[list[int], int, int]  # elements of the parameters, ranks, bytes per element
CASES: list[Case] = [
    (numels, ranks, itemsize)
    for numels in ([1], [0], [0, 5, 0], [16, 16], [17, 3, 64], [1000], [1, 1, 1, 1, 1, 1, 1], [255, 256, 257])
    for ranks, itemsize in ((1, 4), (2, 8), (3, 2), (5, 1))
]


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    numels = [draw.randrange(draw.choice((2, 40, 400))) for _ in range(draw.randrange(1, 9))]
    return numels, draw.randrange(1, 9), draw.choice((1, 2, 4, 8))


def every_case(check: Callable[[list[int], int, int], None]) -> Callable[[], None]:
    """Run a test on all cases and many random ones, as one test."""

    def test() -> None:
        for case in [*CASES, *map(random_case, range(200))]:
            check(*case)

    return test


def flat_array(layout: FlatLayout) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the flat memory and the parameters in it; every element is a different number, padding is -1."""
    flat, parameters, first = np.full(layout.numel, -1), [], 0
    for offset, numel in zip(layout.offsets, layout.numels):
        parameters.append(np.arange(first, first + numel))
        assert (flat[offset : offset + numel] == -1).all(), "two parameters in one place"
        flat[offset : offset + numel] = parameters[-1]
        first += numel
    return flat, parameters


@every_case
def test_slices_equal_numpys_split_of_the_flat_tensor(numels: list[int], ranks: int, itemsize: int) -> None:
    layout = lay_out(numels, ranks, itemsize)
    flat, parameters = flat_array(layout)
    assert layout.numels == tuple(numels) and flat.size == ranks * layout.slice_numel
    seen: list[list[int]] = [[] for _ in numels]
    for rank, own in enumerate(np.split(flat, ranks)):
        assert own.size == layout.slice_numel
        rest = np.ones(own.size, bool)
        for held, parameter, elements in zip(layout.held(rank), parameters, seen):
            assert held.numel == held.end - held.begin >= 0
            part = own[held.offset : held.offset + held.numel]
            assert part.tolist() == parameter[held.begin : held.end].tolist()
            rest[held.offset : held.offset + held.numel] = False
            elements.extend(part.tolist())
        assert (own[rest] == -1).all(), "an element other than padding has no owner"
    # In rank order, the ranks hold every element exactly once.
    assert seen == [parameter.tolist() for parameter in parameters]


@every_case
def test_parameters_and_slices_are_aligned_to_cache_lines_with_minimal_padding(
    numels: list[int], ranks: int, itemsize: int
) -> None:
    layout = lay_out(numels, ranks, itemsize)
    starts = [*layout.offsets, layout.slice_numel]
    assert all(start * itemsize % ALIGN == 0 for start in starts)
    lines = [-(-numel * itemsize // ALIGN) for numel in numels]
    assert list(layout.offsets) == [sum(lines[:number]) * ALIGN // itemsize for number in range(len(numels))]
    assert layout.slice_numel * itemsize == ALIGN * max(1, -(-sum(lines) // ranks))


def test_a_parameter_without_local_elements_is_an_empty_slice_at_0() -> None:
    layout = lay_out([16, 40], 4, 4)
    assert layout == FlatLayout((0, 16), (16, 40), 4, 16)
    assert layout.held(0) == [HeldRange(0, 16, 0), HeldRange(0, 0, 0)]
    assert layout.held(1) == [HeldRange(0, 0, 0), HeldRange(0, 16, 0)]
    assert layout.held(3) == [HeldRange(0, 0, 0), HeldRange(32, 40, 0)]


# Places in a ring -----------------------------------------------------------------------------------------------------


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


def test_writers_may_come_in_any_order_and_readers_in_sequence() -> None:
    draw = random.Random(11)
    for sizes, capacity in rings():
        play(sizes, capacity, draw)


def play(sizes: list[int], capacity: int, draw: random.Random) -> None:
    """Write tensors whenever there is space; read and release them one after the other."""
    slots, memory = ring_slots(sizes, capacity), np.full(capacity, -1)
    offsets = [memory[slot.offset : slot.offset + size] for slot, size in zip(slots, sizes)]
    done, written = 0, set[int]()
    while done < len(sizes):
        free = [k for k in range(done, len(sizes)) if k not in written and slots[k].after <= done]
        if done in written and (not free or draw.random() < 0.4):
            assert (offsets[done] == done).all(), f"{done} was overwritten"
            offsets[done][:] = -1
            done += 1
            continue
        assert free, "no writer can continue"
        chosen = draw.choice(free)
        assert (offsets[chosen] == -1).all(), f"{chosen} is written where {set(offsets[chosen])} is still stored"
        offsets[chosen][:] = chosen
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
