"""Find memory for whole gradients: in a ring that the node shares, or fresh for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.fsdp.layout import ring


class Room(Protocol):
    """Give pieces of gradients memory in the order in which they are reduced; sizes are in bytes."""

    def order(self, sizes: Sequence[int]) -> None:
        """Take note of the sizes of all pieces, in the order in which they will be reduced."""

    def before(self, number: int) -> int:
        """Return how many pieces have to be reduced before the one of that number finds room."""

    def open(self, number: int) -> Tensor:
        """Return memory for the gradients of a piece, as bytes."""


class Ring:
    """Hold memory, shared by the node, through which all pieces go, one behind the other.

    Every rank finds a piece in the same place, whenever its own gradients come. A call by all ranks makes it.
    """

    def __init__(self, comm: Communicator, capacity: int) -> None:
        self._memory = comm.empty(capacity, torch.uint8)
        self.order([])

    def order(self, sizes: Sequence[int]) -> None:
        """Take note of the pieces' order."""
        self._sizes, self._seats = sizes, ring(sizes, self._memory.numel())

    def before(self, number: int) -> int:
        """Return how many pieces come before: up to the last one that lies where it will lie."""
        return self._seats[number].after

    def open(self, number: int) -> Tensor:
        """Return the place of a piece."""
        offset = self._seats[number].offset
        return self._memory[offset : offset + self._sizes[number]]


class Fresh:
    """Take memory on a device for each piece when its first gradient comes, for at most ``limit`` of them together."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device, self._limit = device, limit
        self.order([])

    def order(self, sizes: Sequence[int]) -> None:
        """Take note of the pieces' order."""
        self._sizes = sizes

    def before(self, number: int) -> int:
        """Return how many pieces come before: all but as many as may be there together."""
        return max(number + 1 - self._limit, 0)

    def open(self, number: int) -> Tensor:
        """Return memory for a piece."""
        return torch.empty(self._sizes[number], dtype=torch.uint8, device=self._device)
