"""Remote update of a part on another node: fetch what the update touches, update a copy, and write it back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.parallel.asynchronous.store.piece import Part, Piece
from hpctrain.parallel.asynchronous.store.share import Block, Share, table_part
from hpctrain.parallel.asynchronous.tables.table import by_rows, rows_of
from hpctrain.transport.onesided.exposed import Exposed


class FarUpdate:
    """Copy of an owner's dense parameters, and of the rows that have a gradient, with their states."""

    def __init__(self, exposed: Exposed, owner: int, share: Share) -> None:
        self._exposed, self._owner = exposed, owner
        self._memory = torch.empty(share.dense_length, dtype=exposed.dtype)
        if share.dense:
            exposed.get(owner, self._memory)
        self._copies: list[tuple[Tensor, Tensor | None, int]] = [(self._memory, None, 0)]  # copy, table rows, offset
        self.parts: list[Part] = share.dense_parts(self._memory)

    def fetch(self, block: Block, gradient: Tensor) -> Tensor:
        """Fetch the rows of a gradient as an additional part; return the gradient relative to these rows."""
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
        """Update the copies and write them back: with ``alone`` as they are, otherwise add the changes.

        ``alone`` means that no other worker may write to the owner's part at the same time.
        """
        before = [copy.clone() for copy, _, _ in self._copies]
        Piece(self.parts, optimizer).step(gradients, seen)
        for (copy, rows, start), old in zip(self._copies, before):
            if not alone:
                copy.sub_(old)  # keeps concurrent updates of other workers
            if rows is not None:
                bring = self._exposed.put_rows if alone else self._exposed.add_rows
                bring(self._owner, copy, rows, start)
            elif copy.numel():
                (self._exposed.put if alone else self._exposed.add)(self._owner, copy)
