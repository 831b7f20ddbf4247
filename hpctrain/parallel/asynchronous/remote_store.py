"""Store of parameters and optimizer states in memory that all workers can access, partitioned over owners.

Note: how an update is made. torch's own optimizer of the worker's class updates the owner's part:
in place if the worker shares that memory, otherwise on a copy that is read and written back. The
hyperparameters are the current ones of the worker's optimizer. States follow the parameters in the
same memory. A counter of the owner counts the updates of its part. For a table, only the rows that
have a gradient are communicated and changed, with their states.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.rma.remote_memory import WORDS as LOCK_WORDS
from hpctrain.comm.rma.remote_memory import Lock
from hpctrain.comm.rma.select import expose
from hpctrain.comm.transport.base import Transport
from hpctrain.parallel.asynchronous.partition import (
    PartGroup,
    StateSpec,
    TableRows,
    part_of,
    states_of,
    table_part,
    union_of,
)
from hpctrain.parallel.asynchronous.sparse import rows_of, sparse_rows

if TYPE_CHECKING:
    from hpctrain.parallel.asynchronous.parameter_server import ServedVector


# Counters of an owner: those of its lock, the updates of its dense part, and the updates of each table.
VERSION, TABLES = LOCK_WORDS, LOCK_WORDS + 1


class Store:
    """Parts of all owners, and their updates. Created and freed collectively."""

    def __init__(
        self, transport: Transport, optimizer: torch.optim.Optimizer, vector: ServedVector, owners: Sequence[int]
    ) -> None:
        self.rank, self.owners = transport.rank, list(owners)
        self._optimizer, self._vector = optimizer, vector
        self._states = union_of([states_of(optimizer, group) for group, size in enumerate(vector.groups) if size])
        groups = [table.group_in(optimizer) for table in vector.tables]
        named = list(zip(vector.tables, groups))
        self._table_states = [states_of(optimizer, group, table=table.name) for table, group in named]
        tables = [(*table.shape, group, spec) for (table, group), spec in zip(named, self._table_states)]
        self.owner_parts = {
            owner: part_of(index, len(self.owners), vector.groups, self._states, tables)
            for index, owner in enumerate(self.owners)
        }
        own = self.owner_parts.get(self.rank)
        length, words = own.length if own else 0, TABLES + len(tables)
        self.exposed = expose(transport, length, vector.values.dtype, words)
        self.lock = Lock(self.exposed)
        views = {owner: view for owner in self.owners if (view := self.exposed.view(owner)) is not None}
        self._own = (own, views[self.rank]) if own is not None else None
        if own is not None:
            own.initialize_states(views[self.rank])
        # Parts that this rank can update in place, because it shares the owner's memory.
        held = {owner: self.owner_parts[owner] for owner in views}
        parts = {owner: part.parts(views[owner]) for owner, part in held.items() if part.length}
        self._local = {owner: PartGroup(part, optimizer) for owner, part in parts.items()}
        # Without locks, one optimizer step updates all parts: its cost grows with calls more than with
        # tensors.
        self._node_parts = PartGroup(list(chain(*parts.values())), optimizer) if parts else None

    # Reads and writes -------------------------------------------------------------------------------------------------

    def read(self, out: Tensor, state: int = 0) -> Tensor:
        """Read all dense parameters, or one of their states (counted from 1), into ``out``, and return it."""
        for owner, owner_part in self.owner_parts.items():
            if owner_part.dense:
                self.exposed.get(owner, out[owner_part.dense_slice], state * owner_part.dense)
        return out

    def read_rows(self, table: int, rows: Tensor) -> Tensor:
        """Return rows of a table; the indices are sorted and unique."""
        out = torch.empty(rows.numel(), self._vector.tables[table].shape[1], dtype=self.exposed.dtype)
        for owner, owner_part in self.owner_parts.items():
            block = owner_part.blocks[table]
            where = _within(rows, block)
            if where.start < where.stop:
                self.exposed.get_rows(owner, out[where], rows[where] - block.first, block.start)
        return out

    def read_table(self, table: int, state: int = 0) -> Tensor:
        """Return a whole table, or one of its states (counted from 1)."""
        out = torch.empty(self._vector.tables[table].shape, dtype=self.exposed.dtype)
        for owner, owner_part in self.owner_parts.items():
            block = owner_part.blocks[table]
            if block.rows:
                self.exposed.get(owner, out[block.first : block.last], block.start + state * block.rows * block.width)
        return out

    def write_own(self, values: Tensor) -> None:
        """Write this rank's part: dense parameters from ``values``, table rows from the model."""
        if self._own is None:
            return
        owner_part, memory = self._own
        memory[: owner_part.dense].copy_(values[owner_part.dense_slice])
        for block, table in zip(owner_part.blocks, self._vector.tables):
            block.matrix(memory)[: block.rows].copy_(table.parameter.data[block.first : block.last])

    # Updates ----------------------------------------------------------------------------------------------------------

    def update(self, order: Sequence[int], *, locked: bool) -> None:
        """Make one update of all parts with the collected gradients, in an order of owners."""
        seen = [self._count(self._counting_owner(number), number) for number in range(len(self._vector.tables))]
        if not locked:
            self._update_node(seen)
        for owner in order:
            if not locked and owner in self._local:
                continue
            gradients = self._row_gradients(owner)
            if not self.owner_parts[owner].dense and not any(rows is not None for rows in gradients):
                continue
            if locked:
                with self.lock.of(owner):
                    self._update(owner, gradients, seen, exclusive=True)
            else:
                self._update(owner, gradients, seen)

    def _update_node(self, seen: Sequence[int]) -> None:
        """Make one update of all parts in this node's memory."""
        gradients: list[Tensor | None] = []
        counts: list[int] = []
        for owner in self._local:
            dense, count = self._dense(owner)
            gradients += [*dense, *self._row_gradients(owner)]
            counts += [*count, *seen]
        if self._node_parts is not None and any(gradient is not None for gradient in gradients):
            self._node_parts.step(gradients, counts)

    def update_own(self) -> None:
        """Make one update of this rank's part, while each other owner does the same."""
        if self.rank in self.owner_parts:
            seen = [self._count(self.rank, number) for number in range(len(self._vector.tables))]
            self._update(self.rank, self._row_gradients(self.rank), seen)

    def _counting_owner(self, table: int) -> int:
        """Return the owner that counts the updates of a table; different tables have different owners."""
        return self.owners[table % len(self.owners)]

    def _count(self, owner: int, table: int) -> int:
        """Count an update of a table, if its optimizer counts steps and it has a gradient; return the earlier updates.

        This is how torch counts: rows without a gradient age, a table without any gradient does
        not.
        """
        if self._vector.rows[table] is None or not self._table_states[table].step:
            return 0
        return self.exposed.fetch_add(owner, TABLES + table, 1)

    def _row_gradients(self, owner: int) -> list[Tensor | None]:
        """Return the gradients of an owner's rows, indexed from its first row; None without a gradient."""
        found: list[Tensor | None] = []
        for gradient, block in zip(self._vector.rows, self.owner_parts[owner].blocks):
            where = slice(0, 0) if gradient is None else _within(rows_of(gradient), block)
            if gradient is None or where.start == where.stop:
                found.append(None)
            else:
                shape = (block.rows, block.width)
                found.append(sparse_rows(rows_of(gradient)[where] - block.first, gradient.values()[where], shape))
        return found

    def _update(
        self, owner: int, tables: Sequence[Tensor | None], seen: Sequence[int], *, exclusive: bool = False
    ) -> None:
        dense, counts = self._dense(owner)
        local = self._local.get(owner)
        if local is not None:
            local.step([*dense, *tables], [*counts, *seen])
            return
        # Copies of the dense parameters, and of the rows that have a gradient, with their states.
        owner_part = self.owner_parts[owner]
        memory = torch.empty(owner_part.dense_length, dtype=self.exposed.dtype)
        if owner_part.dense:
            self.exposed.get(owner, memory)
        copies: list[tuple[Tensor, Tensor | None, int]] = [(memory, None, 0)]  # copy, table rows, offset
        parts, gradients = owner_part.dense_parts(memory), dense
        for block, gradient, count in zip(owner_part.blocks, tables, seen):
            if gradient is None:
                continue
            rows = block.with_states(block.first + rows_of(gradient))
            matrix = torch.empty(rows.numel(), block.width, dtype=self.exposed.dtype)
            self.exposed.get_rows(owner, matrix, rows, block.start)
            copies.append((matrix, rows, block.start))
            parts.append(table_part(matrix, block.group, block.spec))
            few = gradient.values().shape[0]
            gradients.append(sparse_rows(torch.arange(few), gradient.values(), (few, block.width)))
            counts.append(count)
        before = [copy.clone() for copy, _, _ in copies]
        PartGroup(parts, self._optimizer).step(gradients, counts)
        for (copy, table_rows, start), old in zip(copies, before):
            self._write_back(owner, copy if exclusive else copy.sub_(old), table_rows, start, exclusive=exclusive)

    def _write_back(self, owner: int, values: Tensor, rows: Tensor | None, start: int, *, exclusive: bool) -> None:
        """Write an updated copy; unless ``exclusive``, add changes, which keeps concurrent updates of other workers."""
        memory = self.exposed
        if rows is not None:
            (memory.put_rows if exclusive else memory.add_rows)(owner, values, rows, start)
        elif values.numel():
            (memory.put if exclusive else memory.add)(owner, values)

    def _dense(self, owner: int) -> tuple[list[Tensor], list[int]]:
        """Count an update of an owner's dense parameters; return the gradients and earlier updates of each section."""
        owner_part = self.owner_parts[owner]
        version = self.exposed.fetch_add(owner, VERSION, 1) if owner_part.dense else 0
        dense = [self._vector.gradient[owner_part.dense_slice][where] for _, where in owner_part.sections]
        return dense, [version] * len(dense)

    # Optimizer states for checkpoints ---------------------------------------------------------------------------------

    def export_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the current states into an optimizer, as if it had made the updates."""
        count = self.exposed.fetch_add(self.owners[-1], VERSION)  # the last owner has dense parameters if any owner has
        vector = self._vector
        if count:
            for number, (key, _) in enumerate(self._states.tensors, 1):
                whole = self.read(torch.empty(vector.values.shape, dtype=self.exposed.dtype), number)
                for parameter, view in zip(vector.parameters, vector.views(whole)):
                    optimizer.state[parameter][key] = view
            for parameter in vector.parameters if self._states.step else ():
                optimizer.state[parameter]["step"] = _step(self._states, count)
        for number, (table, spec) in enumerate(zip(vector.tables, self._table_states)):
            for state, (key, _) in enumerate(spec.tensors, 1):
                optimizer.state[table.parameter][key] = self.read_table(number, state)
            if spec.step:
                seen = self.exposed.fetch_add(self._counting_owner(number), TABLES + number)
                optimizer.state[table.parameter]["step"] = _step(spec, seen)

    def import_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Set this rank's part of the states from an optimizer."""
        if self._own is None or not optimizer.state:
            return
        owner_part, memory = self._own
        states = [optimizer.state.get(parameter, {}) for parameter in self._vector.parameters]
        for number, (key, _) in enumerate(self._states.tensors, 1):
            whole = torch.cat([state[key].reshape(-1).cpu() for state in states])
            memory[number * owner_part.dense : (number + 1) * owner_part.dense].copy_(whole[owner_part.dense_slice])
        if self._states.step:
            self._set(VERSION, int(states[0]["step"]))
        for number, (table, spec, block) in enumerate(zip(self._vector.tables, self._table_states, owner_part.blocks)):
            state = optimizer.state.get(table.parameter, {})
            for index, (key, _) in enumerate(spec.tensors if state else (), 1):
                rows = state[key][block.first : block.last]
                block.matrix(memory)[index * block.rows : (index + 1) * block.rows].copy_(rows)
            if state and spec.step:
                self._set(TABLES + number, int(state["step"]))

    def _set(self, word: int, value: int) -> None:
        self.exposed.fetch_add(self.rank, word, value - self.exposed.fetch_add(self.rank, word))

    def free(self) -> None:
        self._local.clear()
        self._node_parts = self._own = None
        self.exposed.free()


def _within(rows: Tensor, block: TableRows) -> slice:
    """Return the slice of sorted rows that a block contains."""
    first, last = torch.searchsorted(rows, torch.tensor([block.first, block.last])).tolist()
    return slice(first, last)


def _step(spec: StateSpec, count: int) -> Tensor | int:
    return torch.tensor(float(count)) if spec.step == "tensor" else count
