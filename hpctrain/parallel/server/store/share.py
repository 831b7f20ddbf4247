"""Say where in an owner's memory its piece of the parameters lies: stretches of a vector, rows of tables, states.

Note: the layout. First the owner's stretch of the dense parameters, behind it each of their states in the same order.
Then, table by table, a matrix as wide as the table: the owner's rows, behind them each of their states in the same
order. So row r of state s is row r + s x rows of one matrix, and one list of rows reaches a row with all its states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.parallel.server.store.piece import Part
from hpctrain.parallel.server.store.states import States


@dataclass(frozen=True)
class Block:
    """Be the rows ``first`` to ``last`` of a table, whose matrix begins at the element ``start``."""

    first: int
    last: int
    width: int
    group: int
    kept: States
    start: int

    @property
    def rows(self) -> int:
        """Return how many rows of the table the owner has."""
        return self.last - self.first

    @property
    def height(self) -> int:
        """Return how many rows the matrix has, with those of states."""
        return self.rows * (1 + len(self.kept.tensors))

    def matrix(self, memory: Tensor) -> Tensor:
        """Return the matrix in the owner's memory."""
        return memory[self.start : self.start + self.height * self.width].view(self.height, self.width)

    def with_states(self, rows: Tensor) -> Tensor:
        """Return where rows of the table, and their states, are in the matrix."""
        firsts = torch.arange(1 + len(self.kept.tensors)) * self.rows
        return (firsts[:, None] + (rows - self.first)).view(-1)


@dataclass(frozen=True)
class Share:
    """Be what one owner has: the stretch ``cut`` of all dense parameters, and a block of each table."""

    cut: slice
    stretches: Sequence[tuple[int, slice]]  # group, and where within the cut
    kept: States  # of dense parameters
    blocks: Sequence[Block]

    @property
    def dense(self) -> int:
        """Return how many dense parameters the owner has."""
        return int(self.cut.stop - self.cut.start)

    @property
    def dense_length(self) -> int:
        """Return how many elements they and their states take."""
        return self.dense * (1 + len(self.kept.tensors))

    @property
    def length(self) -> int:
        """Return how many elements all takes."""
        return self.dense_length + sum(block.height * block.width for block in self.blocks)

    def dense_parts(self, memory: Tensor) -> list[Part]:
        """Return the stretches with their states, in memory that begins as the owner's does."""
        return [
            Part(
                group,
                memory[where],
                {key: memory[number * self.dense :][where] for number, (key, _) in enumerate(self.kept.tensors, 1)},
                self.kept,
            )
            for group, where in self.stretches
        ]

    def set_first_values(self, memory: Tensor) -> None:
        """Fill all states with the values that they begin with."""
        for number, (_, first) in enumerate(self.kept.tensors, 1):
            memory[number * self.dense : (number + 1) * self.dense].fill_(first)
        for block in self.blocks:
            for number, (_, first) in enumerate(block.kept.tensors, 1):
                block.matrix(memory)[number * block.rows : (number + 1) * block.rows].fill_(first)


def table_part(matrix: Tensor, group: int, kept: States) -> Part:
    """Return the rows of a table with their states, which lie behind them in one matrix."""
    rows = matrix.shape[0] // (1 + len(kept.tensors))
    states = {key: matrix[number * rows :][:rows] for number, (key, _) in enumerate(kept.tensors, 1)}
    return Part(group, matrix[:rows], states, kept)


def share_of(
    place: int,
    count: int,
    groups: Sequence[int],
    kept: States,
    tables: Sequence[tuple[int, int, int, States]],
) -> Share:
    """Return what the owner ``place`` of ``count`` has.

    ``groups`` are the elements of each group of the optimizer, which lie one after the other in the whole vector: so a
    piece has at most one stretch of each. ``tables`` are rows, width, group and states of each: they are cut by rows.
    """
    total = sum(groups)
    cut = slice(total * place // count, total * (place + 1) // count)
    blocks, start = [], (cut.stop - cut.start) * (1 + len(kept.tensors))
    for rows, width, group, states in tables:
        block = Block(rows * place // count, rows * (place + 1) // count, width, group, states, start)
        blocks.append(block)
        start += block.height * width
    return Share(cut, _stretches(groups, cut), kept, blocks)


def _stretches(groups: Sequence[int], cut: slice) -> list[tuple[int, slice]]:
    """Return the parts of a piece that belong to each group, whose sizes in the whole vector are given."""
    found, at = [], 0
    for number, size in enumerate(groups):
        first, last = max(at, cut.start), min(at + size, cut.stop)
        if first < last:
            found.append((number, slice(first - cut.start, last - cut.start)))
        at += size
    return found
