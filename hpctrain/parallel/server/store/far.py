"""Update a piece on another node: fetch what the update touches, make it here, and bring it back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.parallel.server.store.piece import Part, Piece
from hpctrain.parallel.server.store.share import Block, Share, table_part
from hpctrain.parallel.server.tables.table import by_rows, rows_of
from hpctrain.transport.onesided.exposed import Exposed


class FarUpdate:
    """Hold a copy of an owner's dense parameters, and of the rows that have a gradient, all with their states."""

    def __init__(self, exposed: Exposed, owner: int, share: Share) -> None:
        self._exposed, self._owner = exposed, owner
        self._memory = torch.empty(share.dense_length, dtype=exposed.dtype)
        if share.dense:
            exposed.get(owner, self._memory)
        self._copies: list[tuple[Tensor, Tensor | None, int]] = [(self._memory, None, 0)]  # rows of which, and where
        self.parts: list[Part] = share.dense_parts(self._memory)

    def fetch(self, block: Block, gradient: Tensor) -> Tensor:
        """Fetch the rows of a gradient, as one more part; return the gradient for these alone."""
        rows = block.with_states(block.first + rows_of(gradient))
        matrix = torch.empty(rows.numel(), block.width, dtype=self._exposed.dtype)
        self._exposed.get_rows(self._owner, matrix, rows, block.start)
        self._copies.append((matrix, rows, block.start))
        self.parts.append(table_part(matrix, block.group, block.kept))
        few = gradient.values().shape[0]
        return by_rows(torch.arange(few), gradient.values(), (few, block.width))

    def make(
        self, optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], seen: Sequence[int], *, alone: bool
    ) -> None:
        """Update the copies, and bring them back: as they are where nobody else may write, else what has changed."""
        before = [copy.clone() for copy, _, _ in self._copies]
        Piece(self.parts, optimizer).step(gradients, seen)
        for (copy, rows, start), old in zip(self._copies, before):
            if not alone:
                copy.sub_(old)  # what others have added meanwhile stays
            if rows is not None:
                bring = self._exposed.put_rows if alone else self._exposed.add_rows
                bring(self._owner, copy, rows, start)
            elif copy.numel():
                (self._exposed.put if alone else self._exposed.add)(self._owner, copy)
