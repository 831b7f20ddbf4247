"""Buffer pools for unsharded gradients: a ring in shared memory of the node, or an allocation per parameter group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator


class BufferPool(Protocol):
    """Buffer pool for the gradients of parameter groups, in the order in which they are reduced; sizes are in bytes."""

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Set the sizes of all groups, in the order in which they will be reduced."""

    def groups_before(self, number: int) -> int:
        """Return the number of groups that must be reduced before there is memory for the group of this number."""

    def buffer(self, number: int) -> Tensor:
        """Return memory for the gradients of a group, as bytes."""


class RingPool:
    """Ring buffer in shared memory of the node, which the groups use one after another.

    A group has the same offset on every rank, whenever a rank computes its gradients. The
    constructor is collective.
    """

    def __init__(self, comm: Communicator, capacity: int) -> None:
        self._memory = comm.empty(capacity, torch.uint8)
        self.set_sizes([])

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Set the order of the groups."""
        self._sizes, self._slots = sizes, ring_slots(sizes, self._memory.numel())

    def groups_before(self, number: int) -> int:
        """Return the number of groups up to the last one whose slot overlaps the slot of this group."""
        return self._slots[number].after

    def buffer(self, number: int) -> Tensor:
        """Return the slot of a group."""
        offset = self._slots[number].offset
        return self._memory[offset : offset + self._sizes[number]]


class FreshPool:
    """Pool on a device that allocates a buffer per group at its first gradient, at most ``limit`` at the same time."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device, self._limit = device, limit
        self.set_sizes([])

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Set the order of the groups."""
        self._sizes = sizes

    def groups_before(self, number: int) -> int:
        """Return the number of groups that must be reduced so that at most ``limit`` are in memory."""
        return max(number + 1 - self._limit, 0)

    def buffer(self, number: int) -> Tensor:
        """Allocate memory for a group."""
        return torch.empty(self._sizes[number], dtype=torch.uint8, device=self._device)


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
