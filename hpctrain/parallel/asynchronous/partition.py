"""Memory layout of an owner's part: a section of the dense vector, rows of tables, and optimizer states.

Tables, whose gradients are sparse, stay in place; their gradients are stored as rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous import replica
from hpctrain.parallel.asynchronous.part_update import OptimizerPart, StateSpec
from hpctrain.parallel.asynchronous.sparse import find_tables
from hpctrain.parallel.model_agreement import trainable


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
        table_parameters = {table.parameter for table in self.tables}
        self.table_groups = [table.group_in(optimizer) for table in self.tables]
        self.parameters = [parameter for parameter in self.parameters if parameter not in table_parameters]
        self._names = known
        self._flat = replica.FlatParameters(model, self.parameters, table_parameters)
        self.values, self.slices = self._flat.values, self._flat.slices
        self.groups = [sum(one.numel() for one in group if one not in table_parameters) for group in ordered]
        self.rows: list[Tensor | None] = [None for _ in self.tables]
        self._staged = not replica.on_host(self.values)
        self.gradient = self._on_host()
        self.host = self._on_host().copy_(self.values) if self._staged else self.values
        self._device_gradient = torch.empty_like(self.values) if self._staged else self.gradient

    def _on_host(self) -> Tensor:
        return torch.zeros(self.values.shape, dtype=self.values.dtype, pin_memory=self.values.is_cuda)

    # Parameters -------------------------------------------------------------------------------------------------------

    def load_host(self) -> None:
        """Set the parameters to the contents of ``host``."""
        if self._staged:
            self.values.copy_(self.host)

    def copy_to_host(self) -> Tensor:
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
        gradients = [self.gradient, *(rows.values() for rows in self.rows if rows is not None)]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
        return norm

    def copy_gradients(self, out: Tensor) -> None:
        """Copy the dense gradients to host memory, with zeros for missing ones."""
        target = self._device_gradient if self._staged else out
        for parameter, view in zip(self.parameters, self.views(target)):
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
            out.copy_(target)

    def set_gradients(self, gradients: Tensor) -> None:
        """Set the parameters' gradients to dense gradients from host memory."""
        target = self._device_gradient.copy_(gradients) if self._staged else gradients
        for parameter, view in zip(self.parameters, self.views(target)):
            parameter.grad = view

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the views of a vector that belong to each parameter, in their shapes."""
        return [vector[index].view(parameter.shape) for parameter, index in zip(self.parameters, self.slices)]


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
    spec: StateSpec
    start: int

    @property
    def rows(self) -> int:
        """Return the number of table rows that the owner holds."""
        return self.last - self.first

    @property
    def height(self) -> int:
        """Return the number of rows of the matrix, including those of states."""
        return self.rows * (1 + len(self.spec.tensors))

    def matrix(self, memory: Tensor) -> Tensor:
        """Return the matrix in the owner's memory."""
        return memory[self.start : self.start + self.height * self.width].view(self.height, self.width)

    def with_states(self, rows: Tensor) -> Tensor:
        """Return the indices in the matrix of table rows and of their states."""
        firsts = torch.arange(1 + len(self.spec.tensors)) * self.rows
        return (firsts[:, None] + (rows - self.first)).view(-1)


@dataclass(frozen=True)
class OwnerPart:
    """Part of one owner: the section ``dense_slice`` of all dense parameters, and a block of each table."""

    dense_slice: slice
    sections: Sequence[tuple[int, slice]]  # group, and slice within dense_slice
    spec: StateSpec  # of dense parameters
    blocks: Sequence[TableRows]

    @property
    def dense(self) -> int:
        """Return the number of dense parameters that the owner holds."""
        return int(self.dense_slice.stop - self.dense_slice.start)

    @property
    def dense_length(self) -> int:
        """Return the number of elements of the dense parameters and their states."""
        return self.dense * (1 + len(self.spec.tensors))

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
                {key: memory[number * self.dense :][where] for number, (key, _) in enumerate(self.spec.tensors, 1)},
                self.spec,
            )
            for group, where in self.sections
        ]

    def initialize_states(self, memory: Tensor) -> None:
        """Fill all states with their initial values."""
        for number, (_, first) in enumerate(self.spec.tensors, 1):
            memory[number * self.dense : (number + 1) * self.dense].fill_(first)
        for block in self.blocks:
            for number, (_, first) in enumerate(block.spec.tensors, 1):
                block.matrix(memory)[number * block.rows : (number + 1) * block.rows].fill_(first)


def table_part(matrix: Tensor, group: int, spec: StateSpec) -> OptimizerPart:
    """Return the rows of a table with their states, which follow them in one matrix."""
    rows = matrix.shape[0] // (1 + len(spec.tensors))
    states = {key: matrix[number * rows :][:rows] for number, (key, _) in enumerate(spec.tensors, 1)}
    return OptimizerPart(group, matrix[:rows], states, spec)


def part_of(
    index: int,
    count: int,
    groups: Sequence[int],
    spec: StateSpec,
    tables: Sequence[tuple[int, int, int, StateSpec]],
) -> OwnerPart:
    """Return the part of owner ``index`` of ``count``.

    ``groups`` are the numbers of elements of the optimizer's groups, which are consecutive in the
    whole vector. A part therefore has at most one section per group. ``tables`` are the rows,
    width, group and states of each table; tables are partitioned by rows.
    """
    total = sum(groups)
    dense_slice = slice(total * index // count, total * (index + 1) // count)
    blocks, start = [], (dense_slice.stop - dense_slice.start) * (1 + len(spec.tensors))
    for rows, width, group, states in tables:
        block = TableRows(rows * index // count, rows * (index + 1) // count, width, group, states, start)
        blocks.append(block)
        start += block.height * width
    return OwnerPart(dense_slice, _sections(groups, dense_slice), spec, blocks)


def _sections(groups: Sequence[int], dense_slice: slice) -> list[tuple[int, slice]]:
    """Return the sections of a part that belong to each group; ``groups`` are sizes in the whole vector."""
    found, offset = [], 0
    for number, size in enumerate(groups):
        first, last = max(offset, dense_slice.start), min(offset + size, dense_slice.stop)
        if first < last:
            found.append((number, slice(first - dense_slice.start, last - dense_slice.start)))
        offset += size
    return found
