"""Description of a range of a flattened tensor as boxes of the tensor, so that readers can locate the elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...], int]  # start, extent, offset of the first element from begin


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Cover the elements ``begin`` to ``end`` (in C order) of a tensor with the fewest axis-parallel boxes.

    Each box is contiguous in the tensor. The boxes are returned in C order; a tensor of d dims
    needs at most 2 d - 1. Each step takes the longest box that starts at the end of the previous
    box. This gives the fewest boxes: boxes that start at the same element are nested, and the rest
    after a longer box never needs more boxes than the rest after a shorter one.
    """
    assert 0 <= begin <= end <= math.prod(shape), (shape, begin, end)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found: list[Box] = []
    at = begin
    while at < end:
        start, extent = _longest(shape, strides, at, end)
        found.append((start, extent, at - begin))
        at += math.prod(extent)
    return found


def _longest(
    shape: Sequence[int], strides: Sequence[int], at: int, end: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return start and extent of the longest contiguous box that begins at element ``at`` and does not pass ``end``."""
    start = tuple(at // stride % length for stride, length in zip(strides, shape))
    for dim, stride in enumerate(strides):
        if at % stride == 0 and end - at >= stride:
            slabs = min((end - at) // stride, shape[dim] - start[dim])
            return start, (*[1] * dim, slabs, *shape[dim + 1 :])
    return (), ()  # a tensor without dims: its single element
