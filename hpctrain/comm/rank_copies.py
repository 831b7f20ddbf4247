"""Copies of the data of each rank, in memory that the other ranks of its node can read after its death."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.tolerant import memory_of_ranks

LINE = 64  # bytes: values start on cache lines
HEADER = LINE  # two numbers for each of the two copies, before and after it

K = TypeVar("K", bound=Hashable)


class RankCopies(Generic[K]):
    """Two copies of each rank's values, used in turn, and one of the values that are ``fixed``.

    ``nbytes`` are the sizes of the values, the same on all ranks. ``serial`` identifies the copies on all
    ranks. A copy has a number; before and after it is written, the number is written too, so that a copy
    that a rank has not completed is known. Construction is collective over ``comm``.
    """

    def __init__(self, comm: Communicator, nbytes: Mapping[K, int], fixed: Collection[K], serial: int) -> None:
        self.serial, self.fixed, self.size = serial, frozenset(fixed), comm.size
        self._sizes, self._places, end = dict(nbytes), dict[K, int](), HEADER
        for key in [each for each in nbytes if each in self.fixed]:
            self._places[key], end = end, end + _padded(nbytes[key])
        begin = end
        for key in [each for each in nbytes if each not in self.fixed]:
            self._places[key], end = end, end + _padded(nbytes[key])
        self._begin, self._length = begin, end - begin  # of the first copy, and of each
        self.nbytes = end + self._length
        self._memory = memory_of_ranks(comm, self.nbytes)
        self.own = self._memory.ranks[comm.rank]

    @property
    def ranks(self) -> Mapping[int, Tensor]:
        """Return the memory of the ranks of this node, by rank at the time of the construction."""
        return self._memory.ranks

    def of(self, memory: Tensor, key: K, number: int) -> Tensor:
        """Return the bytes of a value of a rank, given by its memory, in the copy of this number."""
        begin = self._places[key] + (0 if key in self.fixed else number % 2 * self._length)
        return memory[begin : begin + self._sizes[key]]

    def whole(self, memory: Tensor, number: int) -> Tensor:
        """Return the bytes of all values of a rank in the copy of this number, without those that are fixed."""
        begin = self._begin + number % 2 * self._length
        return memory[begin : begin + self._length]

    def fixed_part(self, memory: Tensor) -> Tensor:
        """Return the bytes of the fixed values of a rank."""
        return memory[HEADER : self._begin]

    def mark(self, number: int, *, complete: bool) -> None:
        """Note that this rank begins the copy of this number, or that the copy is complete."""
        _numbers(self.own)[2 * (number % 2) + complete] = number + 1  # new memory is 0

    def complete(self, number: int) -> list[int]:
        """Return the ranks of this node whose copy of this number is complete."""
        place, both = 2 * (number % 2), [number + 1, number + 1]
        return [rank for rank, memory in self.ranks.items() if _numbers(memory)[place : place + 2].tolist() == both]


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


def _numbers(memory: Tensor) -> Tensor:
    return memory[:HEADER].view(torch.int64)
