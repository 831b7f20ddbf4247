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
from hpctrain.parallel.agreement import broadcast_buffers, broadcast_model, check_same_model
from hpctrain.parallel.asynchronous import replica
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.hooks import FirstRank, Hooks, own_states
from hpctrain.parallel.asynchronous.metrics import CommunicationTime, Histogram
from hpctrain.parallel.asynchronous.sparse import Lookup, TableSteps, find_tables
from hpctrain.parallel.strategy import Metrics, Strategy, clip_whole_gradients, trainable
from hpctrain.shard import Split


class Hogwild(Strategy):
    """Hogwild strategy of one worker, whose parameters are shared by all workers of its node."""

    asynchronous = True

    def __init__(
        self, model: nn.Module, comm: Communicator, settings: AsynchronousSettings = AsynchronousSettings()
    ) -> None:
        self.model, self.comm, self.settings = model, comm, settings
        check_same_model(model, comm)
        broadcast_model(model, comm)
        self._keepers = _keepers(comm)
        self._home = self._keepers[comm.node]
        named = trainable(model)
        # In place if nothing else is needed. Otherwise updates are made separately, to determine the change.
        self._in_place = len(self._keepers) == 1 and all(replica.on_host(parameter) for _, parameter in named)
        tables = [] if self._in_place else find_tables(model)
        order = {table.parameter for table in tables}
        self._flat = replica.Flat(model, [*order, *(one for _, one in named if one not in order)])
        self._tables = TableSteps(tables)
        self._lookup = Lookup(tables, lambda number, rows: self._tables.read(self._copy, number, rows))
        self._began = False
        total = self._flat.values.numel()
        keeps = comm.rank in self._keepers
        self._memory = expose(comm.transport, total + 1 if keeps else 0, self._flat.values.dtype, 1)
        memory = self._memory.view(self._home)
        assert memory is not None, "the ranks of a node share memory"
        self._copy, self._far = memory[:-1], memory[-1:]
        self._seen = 0  # number of updates when this worker read the copy
        self._moves = False  # whether this worker updates in the present step
        self._stale, self._exchanging = Histogram(), CommunicationTime()
        if keeps:
            self._copy.copy_(self._flat.values)
        self._memory.barrier()
        if self._in_place:
            self._flat.move_to(self._copy)
        self._trainable = trainable(model)
        self._hooks = Hooks(model, self._begin, self._gradient_came, self.check_optimizer)

    # A step -----------------------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register this worker's optimizer. Raises ``UsageError`` for a second one."""
        if not self._hooks.is_new(optimizer):
            return
        self._tables.check(optimizer)
        self._hooks.take(optimizer, self._move_comes, self._move_was)

    def _begin(self) -> None:
        """Record the number of updates, once per step; read the node's copy unless updates are made in place."""
        if self._began or not (self.model.training and torch.is_grad_enabled()):
            return
        self._began = True
        self._exchanging.begin_step()
        with self._exchanging:
            self._seen = self._count_moves()
            if not self._in_place:
                self._lookup.forget()
                self._flat.values[self._tables.numel :].copy_(self._copy[self._tables.numel :])

    def _gradient_came(self) -> None:
        with self._exchanging:
            self._memory.progress()

    def _move_comes(self) -> None:
        self._moves = any(parameter.grad is not None for _, parameter in self._trainable)
        if not self._in_place:
            self._before = self._flat.values[self._tables.numel :].clone()
            self._tables.remember()

    def _move_was(self) -> None:
        """Share the update, and count it with its staleness; without a gradient there was no update."""
        if self._moves:
            with self._exchanging:
                if not self._in_place:
                    self._share()
                moves = self._count_moves(1)
            self._stale.note(moves - self._seen if self._began else 0)
        self._began = False

    def _share(self) -> None:
        """Add the change of the update to every copy; of tables, which come first, only the rows it changed."""
        first = self._tables.numel
        change = torch.ones(self._copy.numel() - first + 1, dtype=self._copy.dtype)
        change[:-1] = self._flat.values[first:] - self._before
        self._tables.share(self._memory, self._keepers)
        self._memory.add(self._home, change[:-1], first)
        for keeper in self._keepers:
            if keeper != self._home:
                self._memory.add(keeper, change, first)

    def _count_moves(self, own: int = 0) -> int:
        """Return the number of updates that this node's copy has received, before this worker's ``own``."""
        return self._memory.fetch_add(self._home, 0, own) + int(self._far)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale this worker's gradients so that their norm is at most ``max_norm``; return their norm before."""
        return clip_whole_gradients(self.model, max_norm)

    def join_empty(self, *, backward: bool = True) -> None:
        """Do nothing: every worker makes its own passes."""

    # Common state of all workers --------------------------------------------------------------------------------------

    @contextmanager
    def consensus_view(self) -> Iterator[None]:
        """Put the first node's copy into every model and copy, for the ``with`` block and after it. Collective."""
        self._exchanging.pause()
        self.sync_count += 1
        self._memory.barrier()
        self._seen -= int(self._far)
        first = torch.empty(self._copy.shape, dtype=self._copy.dtype)
        self._memory.get(self._keepers[0], first)
        self._memory.barrier()
        if self.comm.rank in self._keepers:
            self._copy.copy_(first)
            self._far.zero_()  # in single precision it counts exactly up to 16 million
        if not self._in_place:
            self._flat.values.copy_(first)
            self._lookup.know_all()
        self._memory.barrier()
        yield
        self._memory.barrier()  # no rank continues while another still reads

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
        self._exchanging.pause()
        self._memory.barrier()

    def conclude(self) -> None:
        """Leave the copy of the first node, and rank 0's buffers, in the model of every rank. Collective."""
        with self.consensus_view():
            broadcast_buffers(self.model, self.comm)

    def refresh(self) -> None:
        """Make the model's current parameters those of all ranks. Collective."""
        self._memory.barrier()
        if self.comm.rank in self._keepers:
            self._copy.copy_(self._flat.values)
        self._memory.barrier()

    def metrics(self) -> Metrics:
        """Return the staleness of updates, and the fraction of time spent on communication. Collective."""
        self._exchanging.pause()
        self._memory.barrier()  # ranks that still update may need this rank's progress
        return {**self._stale.metrics(self.comm), **self._exchanging.metrics(self.comm)}

    @property
    def split(self) -> Split | None:
        """Return the split in which rank 0 writes what all workers hold alike, and their optimizer states."""
        return FirstRank(self.comm.rank)

    def rank_local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return this worker's buffers and optimizer states, to be saved and filled in place."""
        return own_states(self.model, optimizer)

    def detach(self) -> None:
        """Remove all hooks; leave the result of ``conclude`` in the model's own memory. Collective."""
        attached = self._hooks.remove()
        if attached:
            self.conclude()
        self._lookup.detach()
        if attached:
            self._memory.barrier()
            self._flat.move_to(self._copy.to(self._flat.values.device).clone())
            self._memory.free()


def _keepers(comm: Communicator) -> list[int]:
    """Return the first rank of each node."""
    nodes = comm.all_gather_object(comm.node)
    return [nodes.index(node) for node in range(comm.nodes)]
