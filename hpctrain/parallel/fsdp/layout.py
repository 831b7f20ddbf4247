"""Layout of parameters in flat memory, and the part of them that each rank holds, also as boxes: pure arithmetic.

Note: flat slices. The parameters of a group are stored one after another. Rank r of p holds the
r-th of p equal slices, wherever their boundaries cut the parameters. Thus every rank holds the same
number of elements. All-gather and reduce-scatter need no copy to reorder tensors, and a parameter
is contiguous for the computation (after Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
Sharded Data Parallel", VLDB 2023, section 3.2.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64  # bytes: parameters and slices start on cache lines


@dataclass(frozen=True)
class HeldRange:
    """Range of a parameter's elements that a rank holds, in C order, and its offset in the rank's slice."""

    begin: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class FlatLayout:
    """Layout of a flat tensor in ``ranks`` slices: parameters of ``numels`` elements at offsets ``offsets``."""

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    ranks: int
    slice_numel: int  # elements per slice

    @property
    def numel(self) -> int:
        """Return the elements of the flat tensor, padding included."""
        return self.ranks * self.slice_numel

    def held(self, rank: int) -> list[HeldRange]:
        """Return the range of each parameter that a rank holds; ranges may be empty."""
        low, high = rank * self.slice_numel, (rank + 1) * self.slice_numel
        found = []
        for offset, numel in zip(self.offsets, self.numels):
            begin, end = max(offset, low), min(offset + numel, high)
            found.append(HeldRange(begin - offset, end - offset, begin - low) if begin < end else HeldRange(0, 0, 0))
        return found


def lay_out(numels: Sequence[int], ranks: int, itemsize: int) -> FlatLayout:
    """Place parameters one after another, each aligned to a cache line; ``itemsize`` in bytes."""
    align = max(ALIGN // itemsize, 1)
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // align) * align
    slice_numel = max(-(-end // (ranks * align)), 1) * align
    return FlatLayout(tuple(offsets), tuple(numels), ranks, slice_numel)


@dataclass(frozen=True)
class RingSlot:
    """Slot of one tensor in a ring buffer; the first ``after`` tensors must be released before its use."""

    offset: int
    after: int  # number of tensors, counted from the first


def ring_slots(sizes: Sequence[int], capacity: int) -> list[RingSlot]:
    """Assign slots in a ring of ``capacity`` elements to tensors that are used in order; the largest must fit."""
    slots: list[RingSlot] = []
    end, first_of_lap = 0, 0  # end of the last tensor, and the first tensor since the last wrap-around
    for number, size in enumerate(sizes):
        if end + size > capacity:
            end, first_of_lap = 0, number
        after = next(
            (
                other + 1
                for other in reversed(range(first_of_lap))
                if _overlap(slots[other].offset, sizes[other], end, size)
            ),
            0,
        )
        slots.append(RingSlot(end, max(after, slots[-1].after if slots else 0)))
        end += size
    return slots


def _overlap(start: int, size: int, other: int, length: int) -> bool:
    return start < other + length and other < start + size


# Description of a range of a flattened tensor as boxes of the tensor, so that readers can locate the elements ---------


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
