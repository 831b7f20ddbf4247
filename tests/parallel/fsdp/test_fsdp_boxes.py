"""Boxes: any range of a flattened tensor is a few boxes of the tensor."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest

from hpctrain.parallel.fsdp.param_group import Box, boxes

SHAPES = [shape for dims in range(4) for shape in itertools.product((1, 2, 3, 4), repeat=dims)]
SHAPES += [(2, 3, 1, 2), (3, 2, 2, 2), (2, 1, 3, 1, 2), (24,), (2, 2, 2, 2, 2)]


def stretches(size: int) -> list[tuple[int, int]]:
    return [(begin, end) for begin in range(size + 1) for end in range(begin, size + 1)]


def elements(array: np.ndarray, box: Box) -> np.ndarray:
    start, extent, _ = box
    return array[tuple(slice(low, low + length) for low, length in zip(start, extent))]


@cache
def fewest(shape: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """Return the least number of contiguous boxes for every range, found by trying all boxes of the tensor."""
    size = math.prod(shape)
    array = np.arange(size).reshape(shape)
    sides = [[(low, high) for low in range(length) for high in range(low + 1, length + 1)] for length in shape]
    ends: dict[int, set[int]] = {}
    for box in itertools.product(*sides):
        held = array[tuple(slice(*side) for side in box)].ravel()
        if held[-1] - held[0] + 1 == held.size:
            ends.setdefault(int(held[0]), set()).add(int(held[-1]) + 1)
    counts: dict[tuple[int, int], int] = {}
    for begin, end in sorted(stretches(size), key=lambda stretch: stretch[1] - stretch[0]):
        steps = [stop for stop in ends.get(begin, ()) if stop <= end]
        counts[begin, end] = 0 if begin == end else 1 + min(counts[stop, end] for stop in steps)
    return counts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_cover_the_range_in_order(shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    for begin, end in stretches(array.size):
        found = boxes(shape, begin, end)
        at = 0
        for box in found:
            held = elements(array, box)
            assert held.shape == box[1] and box[2] == at
            assert held.ravel().tolist() == list(range(begin + at, begin + at + held.size))
            at += held.size
        assert at == end - begin
        assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_number_of_boxes_is_minimal(shape: tuple[int, ...]) -> None:
    for (begin, end), count in fewest(shape).items():
        assert len(boxes(shape, begin, end)) == count, (begin, end)


def test_the_number_of_boxes_is_minimal_for_large_tensors() -> None:
    shape = (50_257, 12, 1600)
    begin, end = 7 * 12 * 1600 + 5 * 1600 + 3, 50_000 * 12 * 1600 + 1600 + 1
    found = boxes(shape, begin, end)
    assert [extent for _, extent, _ in found] == [
        (1, 1, 1597),
        (1, 6, 1600),
        (49_992, 12, 1600),
        (1, 1, 1600),
        (1, 1, 1),
    ]
    assert sum(math.prod(extent) for _, extent, _ in found) == end - begin


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)], ids=str)
def test_tensors_without_elements_have_no_boxes(shape: tuple[int, ...]) -> None:
    assert boxes(shape, 0, 0) == []


def test_a_scalar_is_one_box_without_dims() -> None:
    assert boxes((), 0, 1) == [((), (), 0)]
    assert boxes((), 0, 0) == boxes((), 1, 1) == []


@pytest.mark.parametrize("begin, end", [(-1, 2), (3, 2), (0, 7)])
def test_ranges_outside_the_tensor_fail_an_assertion(begin: int, end: int) -> None:
    with pytest.raises(AssertionError):
        boxes((2, 3), begin, end)
