"""Describe a stretch of a flattened tensor as boxes of the tensor, so that others can say where it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...], int]  # start, extent, offset of the first element from begin


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Cover the elements ``begin`` to ``end`` (in C order) of a tensor with the fewest axis-parallel boxes.

    Each box is contiguous in the tensor, and they come in C order: at most 2 d - 1 of them for d dims. Always taking
    the longest box that starts where the last one ended gives the fewest, for those that may start at one element
    are nested, and where a longer one ends no more are needed than where a shorter one does.
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
    """Return start and extent of the longest contiguous box that begins at one element and does not pass another."""
    start = tuple(at // stride % length for stride, length in zip(strides, shape))
    for dim, stride in enumerate(strides):
        if at % stride == 0 and end - at >= stride:
            slabs = min((end - at) // stride, shape[dim] - start[dim])
            return start, (*[1] * dim, slabs, *shape[dim + 1 :])
    return (), ()  # no dims: the one element
