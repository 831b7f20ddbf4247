"""Memory layout of an owner's part: a section of the dense vector, rows of tables, and optimizer states.

Tables, whose gradients are sparse, are not moved; their gradients are kept as rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous import replica
from hpctrain.parallel.asynchronous.part_update import OptimizerPart, ParameterStates
from hpctrain.parallel.asynchronous.sparse import find_tables
from hpctrain.parallel.strategy import trainable


class ServedVector:
    """Dense parameters as one vector on the model's device, and their gradients as one in host memory.

    Note: staging. On a GPU, both have an additional staging vector, so that a step makes one copy
    in each direction. Remote memory is read into ``host``. Gradients are first flattened on the
    device.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        known = {parameter: name for name, parameter in trainable(model)}
        ordered = [[one for one in group["params"] if one in known] for group in optimizer.param_groups]
        self.parameters = [parameter for group in ordered for parameter in group]
        if len(set(self.parameters)) != len(known):
            missing = next((name for one, name in known.items() if one not in set(self.parameters)), "")
            raise UsageError(
                f"the optimizer does not have the parameter {missing}: a server updates all", everywhere=True
            )
        self.tables = find_tables(model)
        apart = {table.parameter for table in self.tables}
        self.table_groups = [table.group_in(optimizer) for table in self.tables]
        self.parameters = [parameter for parameter in self.parameters if parameter not in apart]
        self._names = known
        self._flat = replica.Flat(model, self.parameters, apart)
        self.values, self.places = self._flat.values, self._flat.places
        self.groups = [sum(one.numel() for one in group if one not in apart) for group in ordered]
        self.rows: list[Tensor | None] = [None for _ in self.tables]
        self._staged = not replica.on_host(self.values)
        self.gradient = self._on_host()
        self.host = self._on_host().copy_(self.values) if self._staged else self.values
        self._device_gradient = torch.empty_like(self.values) if self._staged else self.gradient

    def _on_host(self) -> Tensor:
        return torch.zeros(self.values.shape, dtype=self.values.dtype, pin_memory=self.values.is_cuda)

    # Parameters -------------------------------------------------------------------------------------------------------

    def take_host(self) -> None:
        """Set the parameters to the contents of ``host``."""
        if self._staged:
            self.values.copy_(self.host)

    def give_host(self) -> Tensor:
        """Return the parameters in host memory."""
        return self.host.copy_(self.values) if self._staged else self.values

    # Gradients --------------------------------------------------------------------------------------------------------

    def collect(self) -> bool:
        """Move the gradients out of the parameters; return whether there were any."""
        found = any(parameter.grad is not None for parameter in self.parameters)
        self.copy_gradients(self.gradient)
        for parameter in self.parameters:
            parameter.grad = None
        self.rows = [table.gradient() for table in self.tables]
        return found or any(rows is not None for rows in self.rows)

    def norm(self) -> Tensor:
        """Return the norm of the collected gradients."""
        pieces = [self.gradient, *(rows.values() for rows in self.rows if rows is not None)]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(piece) for piece in pieces]))
        return norm

    def copy_gradients(self, out: Tensor) -> None:
        """Copy the dense gradients to host memory, with zeros for missing ones."""
        there = self._device_gradient if self._staged else out
        for parameter, view in zip(self.parameters, self.views(there)):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.layout is not torch.strided:
                raise UsageError(
                    f"the parameter {self._names[parameter]} got a sparse gradient: only those of nn.Embedding and "
                    "nn.EmbeddingBag can be served"
                )
            else:
                view.copy_(parameter.grad)
        if self._staged:
            out.copy_(there)

    def give_gradients(self, gradients: Tensor) -> None:
        """Set the parameters' gradients to dense gradients from host memory."""
        there = self._device_gradient.copy_(gradients) if self._staged else gradients
        for parameter, view in zip(self.parameters, self.views(there)):
            parameter.grad = view

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the views of a vector that belong to each parameter, in their shapes."""
        return [vector[place].view(parameter.shape) for parameter, place in zip(self.parameters, self.places)]


# Memory layout of an owner's part: a section of the dense vector, rows of tables, and optimizer states ----------------
#
# Note: the layout. First comes the owner's section of the dense parameters, followed by each of their
# states in the same order. Then each table has a matrix as wide as the table: the owner's rows,
# followed by each of their states in the same order. Row r of state s is therefore row r + s x rows
# of one matrix, and one list of rows addresses a row with all its states.


@dataclass(frozen=True)
class TableRows:
    """Rows ``first`` to ``last`` of a table, whose matrix begins at the element ``start``."""

    first: int
    last: int
    width: int
    group: int
    kept: ParameterStates
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
class OwnerPart:
    """Part of one owner: the section ``cut`` of all dense parameters, and a block of each table."""

    cut: slice
    stretches: Sequence[tuple[int, slice]]  # group, and slice within the cut
    kept: ParameterStates  # of dense parameters
    blocks: Sequence[TableRows]

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

    def dense_parts(self, memory: Tensor) -> list[OptimizerPart]:
        """Return the sections with their states, in memory with the owner's layout."""
        return [
            OptimizerPart(
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


def table_part(matrix: Tensor, group: int, kept: ParameterStates) -> OptimizerPart:
    """Return the rows of a table with their states, which follow them in one matrix."""
    rows = matrix.shape[0] // (1 + len(kept.tensors))
    states = {key: matrix[number * rows :][:rows] for number, (key, _) in enumerate(kept.tensors, 1)}
    return OptimizerPart(group, matrix[:rows], states, kept)


def share_of(
    place: int,
    count: int,
    groups: Sequence[int],
    kept: ParameterStates,
    tables: Sequence[tuple[int, int, int, ParameterStates]],
) -> OwnerPart:
    """Return the part of owner ``place`` of ``count``.

    ``groups`` are the numbers of elements of the optimizer's groups, which are consecutive in the
    whole vector. A part therefore has at most one section per group. ``tables`` are the rows,
    width, group and states of each table; tables are partitioned by rows.
    """
    total = sum(groups)
    cut = slice(total * place // count, total * (place + 1) // count)
    blocks, start = [], (cut.stop - cut.start) * (1 + len(kept.tensors))
    for rows, width, group, states in tables:
        block = TableRows(rows * place // count, rows * (place + 1) // count, width, group, states, start)
        blocks.append(block)
        start += block.height * width
    return OwnerPart(cut, _stretches(groups, cut), kept, blocks)


def _stretches(groups: Sequence[int], cut: slice) -> list[tuple[int, slice]]:
    """Return the sections of a part that belong to each group; ``groups`` are sizes in the whole vector."""
    found, at = [], 0
    for number, size in enumerate(groups):
        first, last = max(at, cut.start), min(at + size, cut.stop)
        if first < last:
            found.append((number, slice(first - cut.start, last - cut.start)))
        at += size
    return found
