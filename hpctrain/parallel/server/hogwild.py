"""Let all workers of a node update one copy of the parameters, without any lock: Hogwild.

Recht, Re, Wright and Niu, "HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011. The
copy lies in memory that the node shares, and the parameters of models are views of it: passes read what is there at the
moment, the optimizer of each worker writes in place, and of what two write at the same moment one may be lost.

Note: several nodes. Each has a copy. A worker then makes its move on parameters of its own, adds what has changed to
the copy of its node and, by messages or one-sided MPI, to those of the others; sums do not depend on who came first, so
the copies stay together but for what is under way. Moves are counted for their staleness: those of a node by a counter,
those that come from others by one more element of the copy, which is added to by the same message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.agreement import broadcast_buffers, broadcast_model, check_same_model
from hpctrain.parallel.server import flat
from hpctrain.parallel.server.figures.communication import CommunicationTime
from hpctrain.parallel.server.figures.histogram import Histogram
from hpctrain.parallel.server.hooks import Hooks
from hpctrain.parallel.server.settings import ServerSettings
from hpctrain.parallel.server.tables.lookup import Lookup
from hpctrain.parallel.server.tables.moves import TableMoves
from hpctrain.parallel.server.tables.table import find_tables
from hpctrain.parallel.server.worker import FirstRank, own_states
from hpctrain.parallel.strategy import Figures, Strategy, clip_whole_gradients, trainable
from hpctrain.shard import Split
from hpctrain.transport.onesided.expose import expose


class Hogwild(Strategy):
    """Attach a worker to a module, whose parameters all workers of its node have in common."""

    loose = True

    def __init__(self, model: nn.Module, comm: Communicator, settings: ServerSettings = ServerSettings()) -> None:
        self.model, self.comm, self.settings = model, comm, settings
        check_same_model(model, comm)
        broadcast_model(model, comm)
        self._keepers = _keepers(comm)
        self._home = self._keepers[comm.node]
        named = trainable(model)
        # In place where that is all there is to do; else moves are made apart, to know what has changed.
        self._in_place = len(self._keepers) == 1 and all(flat.on_host(parameter) for _, parameter in named)
        tables = [] if self._in_place else find_tables(model)
        order = {table.parameter for table in tables}
        self._flat = flat.Flat(model, [*order, *(one for _, one in named if one not in order)])
        self._tables = TableMoves(tables)
        self._lookup = Lookup(tables, lambda number, rows: self._tables.read(self._copy, number, rows))
        self._began = False
        total = self._flat.values.numel()
        keeps = comm.rank in self._keepers
        self._memory = expose(comm.transport, total + 1 if keeps else 0, self._flat.values.dtype, 1)
        memory = self._memory.view(self._home)
        assert memory is not None, "the ranks of a node share memory"
        self._copy, self._far = memory[:-1], memory[-1:]
        self._seen = 0  # moves, when this worker read the copy
        self._moves = False  # this worker, in the present step
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
        """Take the optimizer whose moves are this worker's; raise ``UsageError`` for a second one."""
        if not self._hooks.is_new(optimizer):
            return
        self._tables.check(optimizer)
        self._hooks.take(optimizer, self._move_comes, self._move_was)

    def _begin(self) -> None:
        """Note how many moves there have been, once a step; read the node's copy where moves are made apart."""
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
        """Share the move, and count it with its staleness; without a gradient none was made."""
        if self._moves:
            with self._exchanging:
                if not self._in_place:
                    self._share()
                moves = self._count_moves(1)
            self._stale.note(moves - self._seen if self._began else 0)
        self._began = False

    def _share(self) -> None:
        """Add what the move has changed to every copy: of tables, which come first, the rows that it has touched."""
        first = self._tables.numel
        change = torch.ones(self._copy.numel() - first + 1, dtype=self._copy.dtype)
        change[:-1] = self._flat.values[first:] - self._before
        self._tables.share(self._memory, self._keepers)
        self._memory.add(self._home, change[:-1], first)
        for keeper in self._keepers:
            if keeper != self._home:
                self._memory.add(keeper, change, first)

    def _count_moves(self, own: int = 0) -> int:
        """Return how many moves this node's copy has seen, before one's ``own``."""
        return self._memory.fetch_add(self._home, 0, own) + int(self._far)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale this worker's gradients so that their norm is at most ``max_norm``; return their norm before."""
        return clip_whole_gradients(self.model, max_norm)

    def contribute_nothing(self, *, backward: bool = True) -> None:
        """Have no part in a pass of the others: every worker makes its own."""

    # What all workers have come to ------------------------------------------------------------------------------------

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Have the copy of the first node in every model, and in every copy, for the ``with`` block and after it."""
        self._exchanging.pause()
        self.met += 1
        self._memory.barrier()
        self._seen -= int(self._far)
        first = torch.empty(self._copy.shape, dtype=self._copy.dtype)
        self._memory.get(self._keepers[0], first)
        self._memory.barrier()
        if self.comm.rank in self._keepers:
            self._copy.copy_(first)
            self._far.zero_()  # as a number of single precision it counts to 16 million
        if not self._in_place:
            self._flat.values.copy_(first)
            self._lookup.know_all()
        self._memory.barrier()
        yield
        self._memory.barrier()  # nobody goes on while another still reads

    @contextmanager
    def summon(self, *, write: bool = False) -> Iterator[None]:
        """Let all ranks write with ``write``, the same values, as they share memory. Collective."""
        if not write:
            yield
            return
        with self.meeting():
            yield
            broadcast_model(self.model, self.comm)
            self.refresh()

    def settle(self) -> None:
        """Wait until all ranks have come here, and serve them meanwhile. Collective."""
        self._exchanging.pause()
        self._memory.barrier()

    def conclude(self) -> None:
        """Leave the copy of the first node, and rank 0's buffers, in the model of every rank. Collective."""
        with self.meeting():
            broadcast_buffers(self.model, self.comm)

    def refresh(self) -> None:
        """Take the parameters that were put into the model as those of all; a call by all ranks."""
        self._memory.barrier()
        if self.comm.rank in self._keepers:
            self._copy.copy_(self._flat.values)
        self._memory.barrier()

    def figures(self) -> Figures:
        """Return how many moves of others came between reading and moving, and the share of communication."""
        self._exchanging.pause()
        self._memory.barrier()  # who still makes a move may need us for it
        return {**self._stale.figures(self.comm), **self._exchanging.figures(self.comm)}

    @property
    def split(self) -> Split | None:
        """Return that rank 0 speaks for what workers hold alike, and for their optimizers."""
        return FirstRank(self.comm.rank)

    def own_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return this worker's buffers and moments, to be saved and filled in place."""
        return own_states(self.model, optimizer)

    def detach(self) -> None:
        """Take all hooks off, leave what ``conclude`` does in memory of the model's own. Collective."""
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
