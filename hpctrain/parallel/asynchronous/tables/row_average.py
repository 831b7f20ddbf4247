"""Average of table gradients over all workers: each sends its own rows and receives those of all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.asynchronous.tables.table import Table, by_rows, rows_of

_NONE = -1  # count of a worker without a gradient; a worker without lookups has 0


def average_rows(tables: Sequence[Table], comm: Communicator) -> None:
    """Replace the gradient of each table by the mean over all ranks; missing rows count as zeros. Collective.

    Rows are summed in rank order, so all ranks hold the same bits. If no rank has a gradient, there
    is no gradient afterwards.
    """
    own = [table.gradient() for table in tables]
    everyone = comm.all_gather_object([_NONE if each is None else int(each.values().shape[0]) for each in own])
    for table, gradient, counts in zip(tables, own, zip(*everyone)):
        if max(counts) > _NONE:
            table.parameter.grad = _average(table, gradient, counts, comm).to(table.parameter.device)


def _average(table: Table, gradient: Tensor | None, counts: Sequence[int], comm: Communicator) -> Tensor:
    width, most = table.shape[1], max(counts)
    rows = torch.zeros(most, dtype=torch.int64)
    values = torch.zeros(most, width, dtype=table.parameter.dtype)
    if gradient is not None:
        count = gradient.values().shape[0]
        rows[:count], values[:count] = rows_of(gradient), gradient.values()
    if not most:
        return by_rows(rows, values, table.shape)
    all_rows = comm.all_gather(torch.empty(comm.size * most, dtype=torch.int64), rows)
    all_values = comm.all_gather(torch.empty(comm.size * most, width, dtype=values.dtype), values)
    given = torch.cat([torch.arange(max(count, 0)) + rank * most for rank, count in enumerate(counts)])
    where, place = torch.unique(all_rows[given], return_inverse=True)
    total = torch.zeros(where.numel(), width, dtype=values.dtype).index_add_(0, place, all_values[given])
    return by_rows(where, total / comm.size, table.shape)
