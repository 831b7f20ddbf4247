"""Updates of tables that a worker makes locally and adds to all copies: only the changed rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.parallel.asynchronous.store.states import states_of
from hpctrain.parallel.asynchronous.tables.table import Table, rows_of
from hpctrain.transport.onesided.exposed import Exposed


class TableMoves:
    """Local table updates; in the copies, tables are stored one after the other, from the first element."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        sizes = [table.parameter.numel() for table in tables]
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.numel = sum(sizes)
        self._before: list[tuple[int, Tensor, Tensor]] = []  # table index, rows, and their values before the update

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` for an optimizer that changes rows without a gradient."""
        for table in self._tables:
            states_of(optimizer, table.group_in(optimizer), table=table.name)

    def read(self, copy: Tensor, number: int, rows: Tensor) -> Tensor:
        """Return rows of a table in a copy."""
        shape, start = self._tables[number].shape, self._starts[number]
        return copy[start : start + shape[0] * shape[1]].view(shape).index_select(0, rows)

    def remember(self) -> None:
        """Save the rows that have a gradient, before an update."""
        self._before.clear()
        for number, table in enumerate(self._tables):
            gradient = table.coalesce()
            if gradient is not None:
                rows = rows_of(gradient)
                self._before.append((number, rows, table.parameter.data[rows]))

    def share(self, memory: Exposed, keepers: Sequence[int]) -> None:
        """Add the changes to every copy."""
        for number, rows, before in self._before:
            change = (self._tables[number].parameter.data[rows] - before).cpu()
            for keeper in keepers:
                memory.add_rows(keeper, change, rows.cpu(), self._starts[number])
        self._before.clear()
