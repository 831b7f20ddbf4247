"""Gradient buckets: gradients that are reduced together, stored contiguously in (node-shared) memory or in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

ALIGN = 64  # bytes: gradients start on cache lines


@dataclass(eq=False)
class GradBucket:
    """Gradient bucket: the gradients of some parameters, stored consecutively in ``flat``.

    The last elements of ``flat`` are flags, one per parameter: 1 if this rank's backward pass
    reached it. They are reduced with the gradients, so that all ranks learn at no extra cost which
    parameters no rank used.
    """

    flat: Tensor
    members: list[int]  # indices of the parameters
    views: list[Tensor]  # their gradients as views of flat, in the parameters' shapes
    flags: Tensor
    missing: set[int] = field(default_factory=set)  # members without a gradient so far in this backward pass

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Mark every member's gradient as missing again."""
        self.missing = set(self.members)
        self.flags.fill_(1)

    def copy_in(self, index: int, gradient: Tensor, scale: float) -> None:
        """Write ``scale`` x a gradient to its view, in one pass over memory; it may be stored there already.

        A share of 0 writes zeros, whatever the gradient is: it may be infinite or NaN.
        """
        view = self.views[index]
        if scale == 0:
            view.zero_()
        elif gradient.device != view.device:
            view.copy_(gradient).mul_(scale)
        else:
            torch.mul(gradient, scale, out=view)

    def fill_missing(self, gradients: Sequence[Tensor | None], scale: float) -> set[int]:
        """Complete the bucket for members without a gradient in this backward pass; return those without any gradient.

        ``gradients`` are this rank's, by parameter. A gradient that was accumulated earlier still
        counts; if there is none, zeros are written.
        """
        unused = set()
        for index, member in enumerate(self.members):
            if member not in self.missing:
                continue
            gradient = gradients[member]
            if gradient is None:
                self.views[index].zero_()
                self.flags[index] = 0
                unused.add(member)
            else:
                self.copy_in(index, gradient, scale)
        self.missing.clear()
        return unused


def assign_buckets(sizes: Sequence[int], order: Sequence[int], first: int, limit: int) -> list[list[int]]:
    """Return the parameters, in ``order``, cut into groups of at most ``limit`` bytes (``first`` for the first group).

    ``sizes`` are in bytes, by parameter. A parameter larger than the limit forms its own group.
    """
    groups: list[list[int]] = []
    filled, capacity = 0, first
    for number in order:
        if not groups or filled + sizes[number] > capacity:
            capacity = limit if groups else first
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += sizes[number]
    return groups


def memory_needed(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> int:
    """Return the number of elements needed for all buckets of these parameters, for any grouping."""
    align = ALIGN // dtype.itemsize
    # Each parameter may start its own bucket, whose flags then need a separate cache line.
    return sum(_padded(parameter.numel(), align) + align for parameter in parameters)


def make_buckets(
    memory: Tensor, parameters: Sequence[nn.Parameter], groups: Sequence[Sequence[int]]
) -> list[GradBucket]:
    """Cut consecutive buckets from flat ``memory``."""
    align = ALIGN // memory.dtype.itemsize
    buckets, start = [], 0
    for members in groups:
        views, end = [], start
        for member in members:
            numel = parameters[member].numel()
            views.append(memory[end : end + numel].view(parameters[member].shape))
            end += _padded(numel, align)
        flags = memory[end : end + len(members)]
        end += _padded(len(members), align)
        memory[start:end].zero_()  # padding is reduced too, and must stay finite
        buckets.append(GradBucket(memory[start:end], list(members), views, flags))
        start = end
    return buckets


def _padded(numel: int, align: int) -> int:
    return -(-numel // align) * align


@dataclass(frozen=True)
class RingSlot:
    """Slot of one tensor in a ring buffer that is smaller than all its tensors together.

    The first ``after`` tensors must be released before its use.
    """

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
                if slots[other].offset < end + size and end < slots[other].offset + sizes[other]  # they overlap
            ),
            0,
        )
        slots.append(RingSlot(end, max(after, slots[-1].after if slots else 0)))
        end += size
    return slots
