"""Store of parameters and optimizer states in memory that all workers can access, partitioned over owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.rma.remote_memory import WORDS as LOCK_WORDS
from hpctrain.comm.rma.remote_memory import Lock, RemoteMemory
from hpctrain.comm.rma.select import expose
from hpctrain.comm.transport.base import Transport
from hpctrain.parallel.asynchronous.partition import (
    OptimizerPart,
    OwnerPart,
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


class RemoteUpdate:
    """Copy of an owner's dense parameters, and of the rows that have a gradient, with their states."""

    def __init__(self, exposed: RemoteMemory, owner: int, owner_part: OwnerPart) -> None:
        self._exposed, self._owner = exposed, owner
        self._memory = torch.empty(owner_part.dense_length, dtype=exposed.dtype)
        if owner_part.dense:
            exposed.get(owner, self._memory)
        self._copies: list[tuple[Tensor, Tensor | None, int]] = [(self._memory, None, 0)]  # copy, table rows, offset
        self.parts: list[OptimizerPart] = owner_part.dense_parts(self._memory)

    def fetch(self, block: TableRows, gradient: Tensor) -> Tensor:
        """Fetch the rows of a gradient as an additional part; return the gradient relative to these rows."""
        rows = block.with_states(block.first + rows_of(gradient))
        matrix = torch.empty(rows.numel(), block.width, dtype=self._exposed.dtype)
        self._exposed.get_rows(self._owner, matrix, rows, block.start)
        self._copies.append((matrix, rows, block.start))
        self.parts.append(table_part(matrix, block.group, block.spec))
        few = gradient.values().shape[0]
        return sparse_rows(torch.arange(few), gradient.values(), (few, block.width))

    def apply(
        self, optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], seen: Sequence[int], *, exclusive: bool
    ) -> None:
        """Update the copies and write them back: with ``exclusive`` as they are, otherwise add the changes.

        ``exclusive`` means that no other worker may write to the owner's part at the same time.
        """
        before = [copy.clone() for copy, _, _ in self._copies]
        PartGroup(self.parts, optimizer).step(gradients, seen)
        for (copy, rows, start), old in zip(self._copies, before):
            if not exclusive:
                copy.sub_(old)  # keeps concurrent updates of other workers
            if rows is not None:
                write = self._exposed.put_rows if exclusive else self._exposed.add_rows
                write(self._owner, copy, rows, start)
            elif copy.numel():
                (self._exposed.put if exclusive else self._exposed.add)(self._owner, copy)


# Store of parameters and optimizer states in memory that all workers can access, partitioned over owners --------------
#
# Note: how an update is made. torch's own optimizer of the worker's class updates the owner's part:
# in place if the worker shares that memory, otherwise on a copy that is read and written back. The
# hyperparameters are the current ones of the worker's optimizer. States follow the parameters in the
# same memory. A counter of the owner counts the updates of its part. For a table, only the rows that
# have a gradient are communicated and changed, with their states.


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
        named = zip(vector.table_groups, vector.tables)
        self._table_states = [states_of(optimizer, group, table=table.name) for group, table in named]
        tables = [
            (*table.shape, group, spec)
            for table, group, spec in zip(vector.tables, vector.table_groups, self._table_states)
        ]
        self.owner_parts = {
            owner: part_of(index, len(self.owners), vector.groups, self._states, tables)
            for index, owner in enumerate(self.owners)
        }
        own = self.owner_parts.get(self.rank)
        length, words = own.length if own else 0, TABLES + len(tables)
        self.exposed = expose(transport, length, vector.values.dtype, words)
        self.lock = Lock(self.exposed)
        memory = self.exposed.view(self.rank)
        if own is not None and memory is not None:
            own.initialize_states(memory)
        parts = {owner: part for owner in self.owners if (part := self._parts(owner))}
        self._local = {owner: PartGroup(part, optimizer) for owner, part in parts.items()}
        # Without locks, one optimizer step updates all parts: its cost grows with calls more than with
        # tensors.
        self._node_parts = (
            PartGroup([part for parts_of in parts.values() for part in parts_of], optimizer) if parts else None
        )

    def _parts(self, owner: int) -> list[OptimizerPart]:
        """Return the parts of an owner that this rank can update in place, if it shares the owner's memory."""
        memory, owner_part = self.exposed.view(owner), self.owner_parts[owner]
        if memory is None or not owner_part.length:
            return []
        tables = [table_part(block.matrix(memory), block.group, block.spec) for block in owner_part.blocks]
        return [*owner_part.dense_parts(memory), *tables]

    # Reads and writes -------------------------------------------------------------------------------------------------

    def read(self, out: Tensor) -> None:
        """Read all dense parameters."""
        for owner, owner_part in self.owner_parts.items():
            if owner_part.dense:
                self.exposed.get(owner, out[owner_part.dense_slice])

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
        owner_part, memory = self.owner_parts.get(self.rank), self.exposed.view(self.rank)
        if owner_part is None or memory is None:
            return
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
        dense, count = self._dense(owner)
        counts = [*count, *seen]
        local = self._local.get(owner)
        if local is not None:
            local.step([*dense, *tables], counts)
        else:
            self._update_remote(owner, dense, tables, counts, exclusive)

    def _dense(self, owner: int) -> tuple[list[Tensor], list[int]]:
        """Count an update of an owner's dense parameters; return the gradients and earlier updates of each section."""
        owner_part = self.owner_parts[owner]
        version = self.exposed.fetch_add(owner, VERSION, 1) if owner_part.dense else 0
        dense = [self._vector.gradient[owner_part.dense_slice][where] for _, where in owner_part.sections]
        return dense, [version] * len(dense)

    def _update_remote(
        self,
        owner: int,
        dense: Sequence[Tensor],
        tables: Sequence[Tensor | None],
        counts: Sequence[int],
        exclusive: bool,
    ) -> None:
        owner_part = self.owner_parts[owner]
        update = RemoteUpdate(self.exposed, owner, owner_part)
        gradients, seen = [*dense], [*counts[: len(dense)]]
        for block, gradient, count in zip(owner_part.blocks, tables, counts[len(dense) :]):
            if gradient is not None:
                gradients.append(update.fetch(block, gradient))
                seen.append(count)
        update.apply(self._optimizer, gradients, seen, exclusive=exclusive)

    # Optimizer states for checkpoints ---------------------------------------------------------------------------------

    def export_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the current states into an optimizer, as if it had made the updates."""
        count = self.exposed.fetch_add(self.owners[-1], VERSION)  # the last owner has dense parameters if any owner has
        vector = self._vector
        if count:
            for number, (key, _) in enumerate(self._states.tensors, 1):
                whole = self._gather(number)
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
        owner_part, memory = self.owner_parts.get(self.rank), self.exposed.view(self.rank)
        if owner_part is None or memory is None or not optimizer.state:
            return
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

    def _gather(self, state: int) -> Tensor:
        whole = torch.empty(self._vector.values.shape, dtype=self.exposed.dtype)
        for owner, owner_part in self.owner_parts.items():
            if owner_part.dense:
                self.exposed.get(owner, whole[owner_part.dense_slice], state * owner_part.dense)
        return whole

    def free(self) -> None:
        """Free the memory. Collective."""
        self._local.clear()
        self._node_parts = None
        self.exposed.free()


def _within(rows: Tensor, block: TableRows) -> slice:
    """Return the slice of sorted rows that a block contains."""
    first, last = torch.searchsorted(rows, torch.tensor([block.first, block.last])).tolist()
    return slice(first, last)


def _step(spec: StateSpec, count: int) -> Tensor | int:
    return torch.tensor(float(count)) if spec.step == "tensor" else count
