"""Hogwild: all workers of a node update one copy of the parameters, without a lock.

Recht, Re, Wright and Niu, "HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic Gradient
Descent", NIPS 2011. The copy is in memory shared by the node, and the parameters of the models are
views of it. Passes read the current values, and the optimizer of each worker writes in place. If
two workers write at the same time, one update may be lost.

Note: with several nodes, each node has a copy. A worker then updates its own parameters. It adds
the change to the copy of its node and, by messages or one-sided MPI, to the copies of the other
nodes. Sums do not depend on the order of arrival, so the copies differ only by updates in flight.
Updates are counted for their staleness: those of a node by a counter, those of other nodes by an
additional element of the copy, which the same message increments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.rma.remote_memory import RemoteMemory
from hpctrain.comm.rma.select import expose
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.sparse import RowReader, TableUpdates, find_tables
from hpctrain.parallel.asynchronous.worker import AsyncWorker, FlatParameters, worker_state


class Hogwild(AsyncWorker):
    """Hogwild strategy of one worker, whose parameters are shared by all workers of its node."""

    asynchronous = has_local_state = True
    memory: RemoteMemory

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        settings: AsynchronousSettings = AsynchronousSettings(),
        *,
        staged: bool = False,
    ) -> None:
        super().__init__(model, comm, settings)
        nodes = comm.all_gather_object(comm.node)
        self._copy_owners = [nodes.index(node) for node in range(comm.nodes)]  # the first rank of each node
        self._copy_owner = self._copy_owners[comm.node]
        named = self._trainable
        # In place if nothing else is needed. Otherwise updates are made separately, to determine the change.
        on_host = not staged and all(parameter.device.type == "cpu" for _, parameter in named)
        self._in_place = len(self._copy_owners) == 1 and on_host
        tables = [] if self._in_place else find_tables(model)
        order = dict.fromkeys([*(table.parameter for table in tables), *(parameter for _, parameter in named)])
        self._flat = FlatParameters(model, list(order), staged=staged)
        self._tables = TableUpdates(tables)
        self._row_reader = RowReader(tables, lambda number, rows: self._tables.read(self._copy, number, rows))
        self._handles += self._row_reader.handles
        total = self._flat.values.numel()
        owns_copy = comm.rank in self._copy_owners
        self.memory = expose(comm.transport, total + 1 if owns_copy else 0, self._flat.values.dtype, 1)
        memory = self.memory.view(self._copy_owner)
        assert memory is not None, "the ranks of a node share memory"
        self._copy, self._remote_updates = memory[:-1], memory[-1:]
        self._version = 0  # number of updates when this worker read the copy
        self._has_update = False  # whether this worker updates in the present step
        if owns_copy:
            self._copy.copy_(self._flat.values)
        self.memory.barrier()
        if self._in_place:
            self._flat.rebind(self._copy)
        self._register_hooks()

    # A step -----------------------------------------------------------------------------------------------------------

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        self._tables.check(optimizer)

    def _begin(self) -> None:
        """Record the number of updates; read the node's copy unless updates are made in place."""
        self._version = self._count_updates()
        if not self._in_place:
            self._row_reader.invalidate()
            self._flat.values[self._tables.numel :].copy_(self._copy[self._tables.numel :])

    def _on_step_begin(self) -> None:
        self._has_update = any(parameter.grad is not None for _, parameter in self._trainable)
        if not self._in_place:
            self._before = self._flat.values[self._tables.numel :].clone()
            self._tables.save_rows()

    def _on_step_end(self) -> None:
        """Share the update, and count it with its staleness; without a gradient there was no update."""
        if self._has_update:
            with self.exchanging:
                if not self._in_place:
                    self._share_update()
                updates = self._count_updates(1)
            self._staleness.record(updates - self._version if self._began else 0)
        self._began = False

    def _share_update(self) -> None:
        """Add the change of the update to every copy; of tables, which come first, only the rows it changed."""
        first = self._tables.numel
        change = torch.ones(self._copy.numel() - first + 1, dtype=self._copy.dtype)
        change[:-1] = self._flat.values[first:] - self._before
        self._tables.add_changes(self.memory, self._copy_owners)
        self.memory.add(self._copy_owner, change[:-1], first)
        for owner in self._copy_owners:
            if owner != self._copy_owner:
                self.memory.add(owner, change, first)

    def _count_updates(self, increment: int = 0) -> int:
        """Return the number of updates that this node's copy has received, before this worker's ``increment``."""
        return self.memory.fetch_add(self._copy_owner, 0, increment) + int(self._remote_updates)

    # Common state of all workers --------------------------------------------------------------------------------------

    @contextmanager
    def consensus_view(self) -> Iterator[None]:
        """Put the first node's copy into every model and copy, for the ``with`` block and after it. Collective."""
        self.exchanging.pause()
        self.sync_count += 1
        self.memory.barrier()
        self._version -= int(self._remote_updates)
        first = torch.empty(self._copy.shape, dtype=self._copy.dtype)
        self.memory.get(self._copy_owners[0], first)
        self.memory.barrier()
        if self.comm.rank in self._copy_owners:
            self._copy.copy_(first)
            self._remote_updates.zero_()  # in single precision it counts exactly up to 16 million
        if not self._in_place:
            self._flat.values.copy_(first)
            self._row_reader.mark_all_valid()
        self.memory.barrier()
        yield
        self.memory.barrier()  # no rank continues while another still reads

    def refresh(self) -> None:
        self.memory.barrier()
        if self.comm.rank in self._copy_owners:
            self._copy.copy_(self._flat.values)
        self.memory.barrier()

    def rank_local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return worker_state(self.model, optimizer)

    def _release(self) -> None:
        self.memory.barrier()
        self._flat.rebind(self._copy.to(self._flat.values.device).clone())
        super()._release()
