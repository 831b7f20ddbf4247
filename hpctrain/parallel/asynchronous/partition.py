"""Part of an owner: memory layout of its parameters and optimizer states, and their updates by torch's optimizers.

Tables, whose gradients are sparse, stay in place; their gradients are stored as rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError

DENSE_OPTIMIZERS = "SGD, Adam, AdamW and Adagrad can be served"
SPARSE_OPTIMIZERS = "SGD and Adagrad without momentum and weight decay, and SparseAdam, take them"


@dataclass(frozen=True)
class StateSpec:
    """Optimizer states of a parameter: tensors of its shape with their initial values, and a step count."""

    tensors: tuple[tuple[str, float], ...] = ()
    step: Literal["", "tensor", "number"] = ""


def states_of(optimizer: torch.optim.Optimizer, group: int = 0, *, table: str = "") -> StateSpec:
    """Return the states of an optimizer, found by an update of a small matrix.

    With the name of a ``table``, the probe has a gradient of some rows only. Raises ``UsageError``
    for states that a server cannot hold and for gradients that torch refuses.
    """
    probe = nn.Parameter(torch.zeros(2, 2))
    probe_optimizer = optimizer_like(
        optimizer, [[probe] if number == group else [] for number in range(len(optimizer.param_groups))]
    )
    before = {key: value.clone() for key, value in probe_optimizer.state[probe].items() if isinstance(value, Tensor)}
    probe.grad = _row_of_ones(probe) if table else torch.ones(2, 2)
    kind = type(optimizer).__name__
    try:
        probe_optimizer.step()
    except RuntimeError as error:
        what, supported = (
            (f"the sparse gradients of {table}", SPARSE_OPTIMIZERS) if table else ("dense gradients", DENSE_OPTIMIZERS)
        )
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{kind} with these options cannot use {what} ({reason}): {supported}", everywhere=True
        ) from error
    tensors, step = [], ""
    for key, value in probe_optimizer.state[probe].items():
        if value is None:
            continue
        if key == "step":
            step = "tensor" if isinstance(value, Tensor) else "number"
        elif isinstance(value, Tensor) and value.shape == probe.shape and value.layout is torch.strided:
            tensors.append((key, float(before[key].flatten()[0].item()) if key in before else 0.0))
        else:
            raise UsageError(_refusal(kind, key, table), everywhere=True)
    return StateSpec(tuple(tensors), step)  # type: ignore[arg-type]


def _row_of_ones(matrix: Tensor) -> Tensor:
    where = torch.zeros(1, 1, dtype=torch.int64)
    return torch.sparse_coo_tensor(where, torch.ones(1, 2), matrix.shape, is_coalesced=True)


def _refusal(kind: str, key: str, table: str) -> str:
    if table:
        return f"{kind} keeps {key}, by which rows of {table} move that have no gradient: {SPARSE_OPTIMIZERS}"
    return f"{kind} keeps {key}, which is not one number per element: a server cannot hold it; {DENSE_OPTIMIZERS}"


def union_of(several: Sequence[StateSpec]) -> StateSpec:
    tensors = {key: first for each in several for key, first in each.tensors}
    return StateSpec(tuple(tensors.items()), next((each.step for each in several if each.step), ""))


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group, for updates in host memory."""
    chosen = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if "capturable" in chosen:
        chosen["capturable"] = False  # is for CUDA graphs
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in chosen.items()}


def optimizer_like(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and hyperparameters for other parameters."""
    pairs = zip(optimizer.param_groups, groups)
    chosen = [{**hyperparameters(own), "params": list(parameters)} for own, parameters in pairs if parameters]
    kind: Any = type(optimizer)
    known = inspect.signature(kind.__init__).parameters  # some arguments take effect when states are created, not later
    options = {key: value for key, value in hyperparameters(optimizer.defaults).items() if key in known}
    return kind(chosen, **options)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class OptimizerPart:
    """Contiguous parameters, or rows of a table, with their optimizer states."""

    group: int  # index into the parameter groups of the worker's optimizer
    values: Tensor
    states: dict[str, Tensor]
    spec: StateSpec


class PartGroup:
    """Parts that an optimizer of the worker's class updates in place, in one step."""

    def __init__(self, parts: Sequence[OptimizerPart], optimizer: torch.optim.Optimizer) -> None:
        self._source, self._parts = optimizer, parts
        self._parameters = [nn.Parameter(part.values) for part in parts]
        groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for part, parameter in zip(parts, self._parameters):
            groups[part.group].append(parameter)
        self._group_indices = [number for number, group in enumerate(groups) if group]
        self._optimizer = optimizer_like(optimizer, groups)
        for part, parameter in zip(parts, self._parameters):
            state: dict[str, Any] = dict(part.states)
            if part.spec.step:
                state["step"] = torch.zeros(()) if part.spec.step == "tensor" else 0
            self._optimizer.state[parameter] = state

    def step(self, gradients: Sequence[Tensor | None], seen: Sequence[int]) -> None:
        """Update the parts that have a gradient; ``seen`` has the number of earlier updates of each part."""
        for number, group in zip(self._group_indices, self._optimizer.param_groups):
            group.update(hyperparameters(self._source.param_groups[number]))
        for part, parameter, gradient, count in zip(self._parts, self._parameters, gradients, seen):
            parameter.grad = gradient
            if part.spec.step == "tensor":
                self._optimizer.state[parameter]["step"].fill_(count)
            elif part.spec.step:
                self._optimizer.state[parameter]["step"] = count
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None


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
        return self.last - self.first

    @property
    def height(self) -> int:
        """Return the number of rows of the matrix, including those of states."""
        return self.rows * (1 + len(self.spec.tensors))

    def matrix(self, memory: Tensor) -> Tensor:
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
        return int(self.dense_slice.stop - self.dense_slice.start)

    @property
    def dense_length(self) -> int:
        """Return the number of elements of the dense parameters and their states."""
        return self.dense * (1 + len(self.spec.tensors))

    @property
    def length(self) -> int:
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

    def parts(self, memory: Tensor) -> list[OptimizerPart]:
        """Return the sections and the rows of tables with their states, in memory with the owner's layout."""
        tables = [table_part(block.matrix(memory), block.group, block.spec) for block in self.blocks]
        return [*self.dense_parts(memory), *tables]

    def initialize_states(self, memory: Tensor) -> None:
        for part in self.parts(memory):
            for key, first in part.spec.tensors:
                part.states[key].fill_(first)


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
