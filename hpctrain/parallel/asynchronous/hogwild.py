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
from hpctrain.comm.rma.select import expose
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.hooks import WorkerHooks, worker_state
from hpctrain.parallel.asynchronous.replica import FlatParameters
from hpctrain.parallel.asynchronous.sparse import RowReader, TableUpdates, find_tables
from hpctrain.parallel.asynchronous.staleness import CommunicationTime, StalenessHistogram
from hpctrain.parallel.model_agreement import broadcast_model, check_same_model, trainable
from hpctrain.parallel.strategy import AsyncStrategy, Metrics, broadcast_buffers


class Hogwild(AsyncStrategy):
    """Hogwild strategy of one worker, whose parameters are shared by all workers of its node."""

    asynchronous = has_local_state = True

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        settings: AsynchronousSettings = AsynchronousSettings(),
        *,
        staged: bool = False,
    ) -> None:
        super().__init__(model, comm)
        self.settings = settings
        check_same_model(model, comm)
        broadcast_model(model, comm)
        self._copy_owners = _copy_owners_of(comm)
        self._copy_owner = self._copy_owners[comm.node]
        named = trainable(model)
        # In place if nothing else is needed. Otherwise updates are made separately, to determine the change.
        on_host = not staged and all(parameter.device.type == "cpu" for _, parameter in named)
        self._in_place = len(self._copy_owners) == 1 and on_host
        tables = [] if self._in_place else find_tables(model)
        order = {table.parameter for table in tables}
        self._flat = FlatParameters(model, [*order, *(one for _, one in named if one not in order)], staged=staged)
        self._tables = TableUpdates(tables)
        self._row_reader = RowReader(tables, lambda number, rows: self._tables.read(self._copy, number, rows))
        self._began = False
        total = self._flat.values.numel()
        owns_copy = comm.rank in self._copy_owners
        self.memory = expose(comm.transport, total + 1 if owns_copy else 0, self._flat.values.dtype, 1)
        memory = self.memory.view(self._copy_owner)
        assert memory is not None, "the ranks of a node share memory"
        self._copy, self._remote_updates = memory[:-1], memory[-1:]
        self._version = 0  # number of updates when this worker read the copy
        self._has_update = False  # whether this worker updates in the present step
        self._staleness, self.exchanging = StalenessHistogram(), CommunicationTime()
        if owns_copy:
            self._copy.copy_(self._flat.values)
        self.memory.barrier()
        if self._in_place:
            self._flat.rebind(self._copy)
        self._trainable = trainable(model)
        self._hooks = WorkerHooks(model, self._begin, self._on_gradient, self.check_optimizer)

    # A step -----------------------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register this worker's optimizer. Raises ``UsageError`` for a second one."""
        if not self._hooks.is_new(optimizer):
            return
        self._tables.check(optimizer)
        self._hooks.attach_optimizer(optimizer, self._on_step_begin, self._on_step_end)

    def _begin(self) -> None:
        """Record the number of updates, once per step; read the node's copy unless updates are made in place."""
        if self._began or not (self.model.training and torch.is_grad_enabled()):
            return
        self._began = True
        self.exchanging.begin_step()
        with self.exchanging:
            self._version = self._count_updates()
            if not self._in_place:
                self._row_reader.invalidate()
                self._flat.values[self._tables.numel :].copy_(self._copy[self._tables.numel :])

    def _on_gradient(self) -> None:
        with self.exchanging:
            self.memory.progress()

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

    @contextmanager
    def unshard(self, *, write: bool = False) -> Iterator[None]:
        """Let all ranks write the same values if ``write`` is set, because they share memory. Collective."""
        if not write:
            yield
            return
        with self.consensus_view():
            yield
            broadcast_model(self.model, self.comm)
            self.refresh()

    def drain(self) -> None:
        """Wait for all ranks, and serve their accesses meanwhile. Collective."""
        self.exchanging.pause()
        self.memory.barrier()

    def conclude(self) -> None:
        """Leave the copy of the first node, and rank 0's buffers, in the model of every rank. Collective."""
        with self.consensus_view():
            broadcast_buffers(self.model, self.comm)

    def refresh(self) -> None:
        """Make the model's current parameters those of all ranks. Collective."""
        self.memory.barrier()
        if self.comm.rank in self._copy_owners:
            self._copy.copy_(self._flat.values)
        self.memory.barrier()

    def metrics(self) -> Metrics:
        """Return the staleness of updates, and the fraction of time spent on communication. Collective."""
        self.exchanging.pause()
        self.memory.barrier()  # ranks that still update may need this rank's progress
        return {**self._staleness.metrics(self.comm), **self.exchanging.metrics(self.comm)}

    def rank_local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return this worker's buffers and optimizer states, to be saved and filled in place."""
        return worker_state(self.model, optimizer)

    def detach(self) -> None:
        """Remove all hooks; leave the result of ``conclude`` in the model's own memory. Collective."""
        attached = self._hooks.remove()
        if attached:
            self.conclude()
        self._row_reader.detach()
        if attached:
            self.memory.barrier()
            self._flat.rebind(self._copy.to(self._flat.values.device).clone())
            self.memory.free()


def _copy_owners_of(comm: Communicator) -> list[int]:
    """Return the first rank of each node."""
    nodes = comm.all_gather_object(comm.node)
    return [nodes.index(node) for node in range(comm.nodes)]
