"""Flat layouts, compared with NumPy's split of the same memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

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
