"""Serve parameters from memory that all ranks reach: workers read them, and update them, at their own pace.

After Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (Downpour SGD), and Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013 (the bound). Nobody serves: owners of a
piece are workers themselves, or ranks that do nothing else (``server.ranks``), and a worker makes its update where the
piece lies (``store``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.agreement import broadcast_buffers, broadcast_model, check_same_model
from hpctrain.parallel.inputs import Arguments
from hpctrain.parallel.objective import Objective
from hpctrain.parallel.server.figures.communication import CommunicationTime
from hpctrain.parallel.server.figures.histogram import Histogram
from hpctrain.parallel.server.hooks import Hooks
from hpctrain.parallel.server.settings import ServerSettings
from hpctrain.parallel.server.staleness import Bound, check_bound
from hpctrain.parallel.server.store.served_vector import ServedVector
from hpctrain.parallel.server.store.store import Store
from hpctrain.parallel.server.tables.lookup import Lookup
from hpctrain.parallel.server.tables.row_average import average_rows
from hpctrain.parallel.server.worker import FirstRank
from hpctrain.parallel.server.writes import Writes
from hpctrain.parallel.strategy import Figures, Strategy, clip_whole_gradients
from hpctrain.shard import Split
from hpctrain.transport.onesided.expose import expose


class ParameterServer(Strategy):
    """Attach a worker, or a rank that only holds parameters, to a module.

    In synchronous mode gradients are averaged at the end of the backward pass, and each owner updates its own piece.
    """

    def __init__(self, model: nn.Module, comm: Communicator, settings: ServerSettings = ServerSettings()) -> None:
        self.model, self.comm, self.settings = model, comm, settings
        self.loose = settings.mode != "synchronous"
        self.workers = comm.size - settings.ranks
        self.works = comm.rank < self.workers
        check_bound(settings.max_staleness, self.workers)
        check_same_model(model, comm)
        broadcast_model(model, comm)
        self._data = comm.split(int(not self.works)) if settings.ranks else comm
        self._board = expose(comm.transport, 0, torch.float32, Bound.words(self.workers))
        self._bound = Bound(self._board, 0, self.workers, settings.max_staleness)
        self._stale, self._exchanging = Histogram(), CommunicationTime()
        self._began = self._pushes = self._averages = False
        self._hooks = Hooks(model, self._begin, self._gradient_came, _refuse_unknown)
        self._writes = Writes(model, "the parameter server")
        self._writes.open = True  # until a run begins, which serves what is here

    @property
    def data(self) -> Communicator:
        """Return the workers, who share out the samples; of a rank that only holds parameters those like it."""
        return self._data

    # A step -----------------------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer whose updates are served; raise ``UsageError`` for one that cannot be."""
        if not self._hooks.is_new(optimizer):
            return
        self._vector = ServedVector(self.model, optimizer)
        self._sum = self.comm.empty(self._vector.gradient.numel(), self._vector.gradient.dtype)
        size, first = self.comm.size, self.workers if self.settings.ranks else 0
        owners = range(first, size)
        self._store = Store(self.comm.transport, optimizer, self._vector, owners)
        self._lookup = Lookup(self._vector.tables, self._read_rows)
        # Each begins with another piece: so they are not all at the same.
        self._order = [owners[(self.comm.rank + step) % len(owners)] for step in range(len(owners))]
        self._store.write_own(self._vector.give_host())
        self._board.barrier()
        self._writes.open = False
        self._writes.note()
        self._hooks.take(optimizer, self._collect, self._move_was)

    def forward_backward(self, inputs: Any, targets: Any, objective: Objective, *, weight: float = 1.0) -> Tensor:
        """Leave gradients in the parameters, if this rank works; return the loss."""
        if not self.works:
            return torch.zeros((), device=Arguments.of(inputs).device)
        return super().forward_backward(inputs, targets, objective, weight=weight)

    def _begin(self) -> None:
        """Read the parameters, once a step."""
        if self._began or not (self.model.training and torch.is_grad_enabled()):
            return
        if self._hooks.optimizer is None:
            return  # no run has begun: all ranks hold what they began with
        self._began = True
        self._writes.check()
        self._exchanging.begin_step()
        with self._exchanging:
            self._bound.read()
            self._read()

    def _read(self, *, tables: bool = False) -> None:
        """Read the dense parameters; whole ``tables`` too, of which passes else read the rows that they look up."""
        self._store.read(self._vector.host)
        self._vector.take_host()
        self._writes.note()
        self._lookup.forget()
        if tables:
            for number, table in enumerate(self._vector.tables):
                table.parameter.data.copy_(self._store.read_table(number))
            self._lookup.know_all()

    def _read_rows(self, table: int, rows: Tensor) -> Tensor:
        with self._exchanging:
            return self._store.read_rows(table, rows)

    def _gradient_came(self) -> None:
        if self.loose:
            with self._exchanging:
                self._board.progress()
        elif self._syncing and not self._averages:
            self._averages = True
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """Give all workers the mean of their gradients, where they are."""
        self._averages = False
        with self._exchanging:
            self._share_gradients()

    def _share_gradients(self) -> None:
        self._board.barrier()  # who reads from us is served here, and not in a collective
        if self._sum.numel():
            self._vector.copy_gradients(self._sum)
            self.comm.all_reduce(self._sum, "average")
            self._vector.give_gradients(self._sum)
        if self._vector.tables:
            average_rows(self._vector.tables, self.comm)

    def _collect(self) -> None:
        """Take the gradients away, so that the optimizer has nothing to do here."""
        self._pushes = self._vector.collect()

    def _move_was(self) -> None:
        with self._exchanging:
            self._push()

    def _push(self) -> None:
        """Make the update where the parameters are, unless somebody has dropped it."""
        if self._pushes and not self.loose:
            self._bound.leave()
            self._store.update_own()
            self._board.barrier()
        elif self._pushes and self.works:
            self._bound.admit()
            self._store.update(self._order, locked=self.settings.lock)
            self._stale.note(self._bound.count())
        elif self._began:
            self._bound.leave()
        self._began = self._pushes = False

    def drop_gradients(self) -> None:
        """Forget all gradients, also those that wait to be pushed."""
        super().drop_gradients()
        self._pushes = False

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale this worker's gradients so that their norm is at most ``max_norm``; return their norm before."""
        if self._pushes:  # the optimizer's move has begun: nothing but the norm is asked for
            return self._vector.norm()
        return clip_whole_gradients(self.model, max_norm)

    def contribute_nothing(self, *, backward: bool = True) -> None:
        """Have no part in a pass of the others; where gradients are averaged, a share of none."""
        if backward and not self.loose:
            self._begin()
            self._average()

    # What all workers have come to ------------------------------------------------------------------------------------

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Have the served parameters in the model, and their states in the optimizer, for the ``with`` block."""
        assert self._hooks.optimizer is not None
        self._exchanging.pause()
        self.met += 1
        self._writes.check()
        self._board.barrier()
        self._read(tables=True)
        self._store.give_states(self._hooks.optimizer)
        self._board.barrier()
        try:
            yield
        finally:
            self._hooks.optimizer.state.clear()

    @contextmanager
    def summon(self, *, write: bool = False) -> Iterator[None]:
        """Let all ranks write with ``write``: what rank 0 has written is served from then on. Collective."""
        if not write or self._hooks.optimizer is None:
            yield
            return
        with self.meeting(), self._writes.counting():
            yield
            broadcast_model(self.model, self.comm)
            self.refresh()

    def settle(self) -> None:
        """Wait until all ranks have come here, and serve them meanwhile. Collective."""
        self._exchanging.pause()
        self._board.barrier()

    def conclude(self) -> None:
        """Leave the served parameters, and rank 0's buffers, in the model of every rank. Collective."""
        if self._hooks.optimizer is not None:
            with self.meeting():
                broadcast_buffers(self.model, self.comm)

    def refresh(self) -> None:
        """Take parameters and states that were put into model and optimizer as those to serve; a call by all ranks."""
        if self._hooks.optimizer is None:
            return
        self._board.barrier()
        self._store.write_own(self._vector.give_host())
        self._store.take_states(self._hooks.optimizer)
        self._hooks.optimizer.state.clear()
        self._lookup.know_all()
        self._writes.note()
        self._board.barrier()

    def figures(self) -> Figures:
        """Return how many updates of others came between reading and updating, and the share of communication."""
        self._exchanging.pause()
        self._board.barrier()  # who still makes an update may need us for it
        return {**self._stale.figures(self.comm), **self._exchanging.figures(self.comm, works=self.works)}

    @property
    def split(self) -> Split | None:
        """Return that rank 0 speaks for what all ranks hold alike in a meeting."""
        return FirstRank(self.comm.rank)

    def detach(self) -> None:
        """Take all hooks off, leave the served parameters in the model, give the memory back; a call by all ranks."""
        attached = self._hooks.remove()
        self._writes.close()
        if attached:
            if self._hooks.optimizer is not None:
                self.conclude()
                self._lookup.detach()
                self._store.free()
            self._board.free()


def _refuse_unknown(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UsageError``: memory for what is served is made when a run begins, and is not there."""
    raise UsageError(
        f'{type(optimizer).__name__}.step() outside of a run under parallel.data = "server": updates are served in the '
        "loop of a run only; write `with job.run(model, optimizer, loader, ...) as run`",
        everywhere=True,
    )
