"""Memory layout of an owner's part: a section of the dense vector, rows of tables, and optimizer states.

Note: the layout. First comes the owner's section of the dense parameters, followed by each of their
states in the same order. Then each table has a matrix as wide as the table: the owner's rows,
followed by each of their states in the same order. Row r of state s is therefore row r + s x rows
of one matrix, and one list of rows addresses a row with all its states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.parallel.asynchronous.store.piece import Part
from hpctrain.parallel.asynchronous.store.states import States


@dataclass(frozen=True)
class Block:
    """Rows ``first`` to ``last`` of a table, whose matrix begins at the element ``start``."""

    first: int
    last: int
    width: int
    group: int
    kept: States
    start: int

    @property
    def rows(self) -> int:
        """Return the number of table rows that the owner holds."""
        return self.last - self.first

    @property
    def height(self) -> int:
        """Return the number of rows of the matrix, including those of states."""
        return self.rows * (1 + len(self.kept.tensors))

    def matrix(self, memory: Tensor) -> Tensor:
        """Return the matrix in the owner's memory."""
        return memory[self.start : self.start + self.height * self.width].view(self.height, self.width)

    def with_states(self, rows: Tensor) -> Tensor:
        """Return the indices in the matrix of table rows and of their states."""
        firsts = torch.arange(1 + len(self.kept.tensors)) * self.rows
        return (firsts[:, None] + (rows - self.first)).view(-1)


@dataclass(frozen=True)
class Share:
    """Part of one owner: the section ``cut`` of all dense parameters, and a block of each table."""

    cut: slice
    stretches: Sequence[tuple[int, slice]]  # group, and slice within the cut
    kept: States  # of dense parameters
    blocks: Sequence[Block]

    @property
    def dense(self) -> int:
        """Return the number of dense parameters that the owner holds."""
        return int(self.cut.stop - self.cut.start)

    @property
    def dense_length(self) -> int:
        """Return the number of elements of the dense parameters and their states."""
        return self.dense * (1 + len(self.kept.tensors))

    @property
    def length(self) -> int:
        """Return the total number of elements."""
        return self.dense_length + sum(block.height * block.width for block in self.blocks)

    def dense_parts(self, memory: Tensor) -> list[Part]:
        """Return the sections with their states, in memory with the owner's layout."""
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
        """Fill all states with their initial values."""
        for number, (_, first) in enumerate(self.kept.tensors, 1):
            memory[number * self.dense : (number + 1) * self.dense].fill_(first)
        for block in self.blocks:
            for number, (_, first) in enumerate(block.kept.tensors, 1):
                block.matrix(memory)[number * block.rows : (number + 1) * block.rows].fill_(first)


def table_part(matrix: Tensor, group: int, kept: States) -> Part:
    """Return the rows of a table with their states, which follow them in one matrix."""
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
    """Return the part of owner ``place`` of ``count``.

    ``groups`` are the numbers of elements of the optimizer's groups, which are consecutive in the
    whole vector. A part therefore has at most one section per group. ``tables`` are the rows,
    width, group and states of each table; tables are partitioned by rows.
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
    """Return the sections of a part that belong to each group; ``groups`` are sizes in the whole vector."""
    found, at = [], 0
    for number, size in enumerate(groups):
        first, last = max(at, cut.start), min(at + size, cut.stop)
        if first < last:
            found.append((number, slice(first - cut.start, last - cut.start)))
        at += size
    return found
