"""Embedding tables of a model: parameters with sparse gradients, of which a pass reads and updates only some rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.rma.remote_memory import RemoteMemory
from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous.partition import states_of
from hpctrain.parallel.model_agreement import trainable

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class EmbeddingTable:
    """Weight of one or several ``nn.Embedding(sparse=True)`` or ``nn.EmbeddingBag(sparse=True)``."""

    name: str
    parameter: nn.Parameter
    modules: tuple[nn.Module, ...]

    @property
    def shape(self) -> tuple[int, int]:
        rows, width = self.parameter.shape
        return rows, width

    def group_in(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the index of the optimizer's parameter group that contains the table."""
        groups = enumerate(optimizer.param_groups)
        return next(number for number, group in groups if any(one is self.parameter for one in group["params"]))

    def coalesce(self) -> Tensor | None:
        """Sum duplicate rows of the gradient and return it; None without a gradient."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if not gradient.is_sparse:
            raise UsageError(
                f"the parameter {self.name} got a dense gradient: a table with sparse=True may only be used for "
                "lookups; remove sparse=True"
            )
        self.parameter.grad = gradient.coalesce()
        return self.parameter.grad

    def gradient(self) -> Tensor | None:
        """Remove the gradient from the parameter; return it in host memory with each row once, None without one."""
        gradient = self.coalesce()
        self.parameter.grad = None
        return None if gradient is None else gradient.detach().cpu()


def rows_of(gradient: Tensor) -> Tensor:
    """Return the row indices of a table's gradient, in order."""
    return gradient.indices()[0]


def sparse_rows(rows: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a sparse gradient with these rows, each once and in order."""
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True)


def find_tables(model: nn.Module) -> list[EmbeddingTable]:
    """Return the tables that are trained. Raises ``UsageError`` for a table that its own forward passes change."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, []).append(module)
    tables = [
        EmbeddingTable(name, parameter, tuple(users[parameter]))
        for name, parameter in trainable(model)
        if all(isinstance(module, EMBEDDINGS) and module.sparse for module in users[parameter])
    ]
    for table in tables:
        if any(module.max_norm is not None for module in table.modules):
            raise UsageError(
                f"the embedding of {table.name} has max_norm, by which passes change rows: a server stores only "
                "updates; remove max_norm",
                everywhere=True,
            )
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    if tables and not checks.is_enabled():
        checks.disable()  # the default; torch warns unless a program has chosen explicitly
    return tables


Read = Callable[[int, Tensor], Tensor]  # returns the rows of the table with that index, in host memory


class RowReader:
    """Hooks that read table rows into a model, each once per step, so that all passes of a step see the same values."""

    def __init__(self, tables: Sequence[EmbeddingTable], read: Read) -> None:
        self._tables, self._read = tables, read
        self._valid = [torch.zeros(table.shape[0], dtype=torch.bool) for table in tables]
        self._valid_rows: list[tuple[Tensor, Tensor]] = []  # marks of valid rows per read, to be cleared
        self._all_valid = False
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._hook(number), with_kwargs=True)
            for number, table in enumerate(tables)
            for module in table.modules
        ]

    def invalidate(self) -> None:
        """Begin a step: rows read before are outdated."""
        for valid, rows in self._valid_rows:
            valid[rows] = False
        self._valid_rows.clear()
        self._all_valid = False

    def mark_all_valid(self) -> None:
        self._all_valid = True

    def _hook(self, number: int) -> Callable[..., None]:
        return lambda _, args, kwargs: self._read_missing(number, args[0] if args else kwargs["input"])

    def _read_missing(self, number: int, indices: Tensor) -> None:
        table, valid = self._tables[number], self._valid[number]
        rows = torch.unique(indices.detach()).cpu().long()  # sorted
        if self._all_valid or not rows.numel() or rows[0] < 0 or rows[-1] >= table.shape[0]:
            return  # torch reports indices that are out of range
        rows = rows[~valid[rows]]
        if not rows.numel():
            return
        valid[rows] = True
        self._valid_rows.append((valid, rows))
        values = table.parameter.data
        values.index_copy_(0, rows.to(values.device), self._read(number, rows).to(values.device))


class TableUpdates:
    """Changed table rows that a worker adds to all copies, which begin with the tables, one after the other."""

    def __init__(self, tables: Sequence[EmbeddingTable]) -> None:
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
        shape, start = self._tables[number].shape, self._starts[number]
        return copy[start : start + shape[0] * shape[1]].view(shape).index_select(0, rows)

    def save_rows(self) -> None:
        """Save the rows that have a gradient, before an update."""
        self._before.clear()
        for number, table in enumerate(self._tables):
            gradient = table.coalesce()
            if gradient is not None:
                rows = rows_of(gradient)
                self._before.append((number, rows, table.parameter.data[rows]))

    def add_changes(self, memory: RemoteMemory, owners: Sequence[int]) -> None:
        for number, rows, before in self._before:
            change = (self._tables[number].parameter.data[rows] - before).cpu()
            for owner in owners:
                memory.add_rows(owner, change, rows.cpu(), self._starts[number])
        self._before.clear()


_NONE = -1  # count of a worker without a gradient; a worker without lookups has 0


def average_rows(tables: Sequence[EmbeddingTable], comm: Communicator) -> None:
    """Replace the gradient of each table by the mean over all ranks; missing rows count as zeros. Collective.

    Each rank sends its own rows and receives those of all. Rows are summed in rank order, so all
    ranks hold the same bits. If no rank has a gradient, there is no gradient afterwards.
    """
    own = [table.gradient() for table in tables]
    everyone = comm.all_gather_object([_NONE if each is None else int(each.values().shape[0]) for each in own])
    for table, gradient, counts in zip(tables, own, zip(*everyone)):
        if max(counts) > _NONE:
            table.parameter.grad = _average(table, gradient, counts, comm).to(table.parameter.device)


def _average(table: EmbeddingTable, gradient: Tensor | None, counts: Sequence[int], comm: Communicator) -> Tensor:
    width, most = table.shape[1], max(counts)
    rows = torch.zeros(most, dtype=torch.int64)
    values = torch.zeros(most, width, dtype=table.parameter.dtype)
    if gradient is not None:
        count = gradient.values().shape[0]
        rows[:count], values[:count] = rows_of(gradient), gradient.values()
    if not most:
        return sparse_rows(rows, values, table.shape)
    all_rows = comm.all_gather(torch.empty(comm.size * most, dtype=torch.int64), rows)
    all_values = comm.all_gather(torch.empty(comm.size * most, width, dtype=values.dtype), values)
    given = torch.cat([torch.arange(max(count, 0)) + rank * most for rank, count in enumerate(counts)])
    where, index = torch.unique(all_rows[given], return_inverse=True)
    total = torch.zeros(where.numel(), width, dtype=values.dtype).index_add_(0, index, all_values[given])
    return sparse_rows(where, total / comm.size, table.shape)
