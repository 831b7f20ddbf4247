"""Serve parameters from memory that all ranks reach: workers read them, and update them, at their own pace.

After Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (Downpour SGD), and Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013 (the bound). Nobody serves: owners of a
piece are workers themselves, or ranks that do nothing else (``server.ranks``), and a worker makes its update where the
piece lies (``store``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.agreement import broadcast_model, check_same_model
from hpctrain.parallel.objective import Objective
from hpctrain.parallel.server.served_vector import ServedVector
from hpctrain.parallel.server.settings import ServerSettings
from hpctrain.parallel.server.staleness import Bound, check_bound
from hpctrain.parallel.server.store import Store
from hpctrain.parallel.server.worker import FirstRank
from hpctrain.parallel.strategy import Strategy, clip_whole_gradients, trainable
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
        self._numbers = comm.empty(2, torch.float64)
        self._stale: list[int] = []
        self._began = self._pushes = self._averages = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(lambda *_: self._begin())]
        for _, parameter in trainable(model):
            register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(lambda _: self._gradient_came()))

    @property
    def data(self) -> Communicator:
        """Return the workers, who share out the samples; of a rank that only holds parameters those like it."""
        return self._data

    # A step -----------------------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer whose updates are served; raise ``UsageError`` for one that cannot be."""
        if self._optimizer is optimizer:
            return
        if self._optimizer is not None:
            raise UsageError("a worker has one optimizer: call job.wrap(model) again for another", everywhere=True)
        self._optimizer = optimizer
        self._vector = ServedVector(self.model, optimizer)
        self._sum = self.comm.empty(self._vector.gradient.numel(), self._vector.gradient.dtype)
        size, first = self.comm.size, self.workers if self.settings.ranks else 0
        owners = range(first, size)
        self._store = Store(self.comm.transport, optimizer, self._vector.groups, self._vector.values.dtype, owners)
        # Each begins with another piece: so they are not all at the same.
        self._order = [owners[(self.comm.rank + step) % len(owners)] for step in range(len(owners))]
        self._store.write_own(self._vector.values.cpu())
        self._board.barrier()
        self._handles += [
            optimizer.register_step_pre_hook(lambda *_: self._collect()),
            optimizer.register_step_post_hook(lambda *_: self._push()),
        ]

    def forward_backward(self, inputs: Tensor, targets: Tensor, objective: Objective, *, weight: float = 1.0) -> Tensor:
        """Leave gradients in the parameters, if this rank works; return the loss."""
        if not self.works:
            return torch.zeros((), device=inputs.device)
        return super().forward_backward(inputs, targets, objective, weight=weight)

    def _begin(self) -> None:
        """Read the parameters, once a step."""
        if self._began or not (self.model.training and torch.is_grad_enabled()):
            return
        self._began = True
        self._bound.read()
        self._read()

    def _read(self) -> None:
        values = self._vector.values
        if values.device.type == "cpu":
            self._store.read(values)
            return
        host = torch.empty(values.shape, dtype=values.dtype)
        self._store.read(host)
        values.copy_(host)

    def _gradient_came(self) -> None:
        if self.loose:
            self._board.progress()
        elif self._syncing and not self._averages:
            self._averages = True
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """Give all workers the mean of their gradients, where they are."""
        self._averages = False
        self._board.barrier()  # who reads from us is served here, and not in a collective
        self._vector.copy_gradients(self._sum)
        self.comm.all_reduce(self._sum, "average")
        for parameter, mean in zip(self._vector.parameters, self._vector.views(self._sum)):
            parameter.grad = mean.to(parameter.device)

    def _collect(self) -> None:
        """Take the gradients away, so that the optimizer has nothing to do here."""
        self._pushes = self._vector.collect()

    def _push(self) -> None:
        """Make the update where the parameters are, unless somebody has dropped it."""
        if self._pushes and not self.loose:
            self._bound.leave()
            if self.comm.rank in self._store.cuts:
                self._store.update(self.comm.rank, self._vector.gradient, locked=False)
            self._board.barrier()
        elif self._pushes and self.works:
            self._stale.append(self._bound.admit())
            for owner in self._order:
                self._store.update(owner, self._vector.gradient, locked=self.settings.lock)
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
            norm: Tensor = torch.linalg.vector_norm(self._vector.gradient)
            return norm
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
        assert self._optimizer is not None
        self._board.barrier()
        self._read()
        self._store.give_states(self._optimizer, self._vector.parameters, self._vector.places)
        self._board.barrier()
        try:
            yield
        finally:
            self._optimizer.state.clear()

    def settle(self) -> None:
        """Wait until all ranks have made their last step, and serve them; a call by all ranks."""
        self._board.barrier()

    def refresh(self) -> None:
        """Take parameters and states that were put into model and optimizer as those to serve; a call by all ranks."""
        if self._optimizer is None:
            return
        self._board.barrier()
        self._store.write_own(self._vector.values.cpu())
        self._store.take_states(self._optimizer, self._vector.parameters, self._vector.places)
        self._optimizer.state.clear()
        self._board.barrier()

    def figures(self) -> Mapping[str, float]:
        """Return how many updates of others came between reading and updating, on average and at most."""
        own = self._stale or [0]
        self._numbers[0], self._numbers[1] = sum(own) / len(own), max(own)
        most = self._numbers[1:].clone()
        self.comm.all_reduce(self._numbers, "average")
        self.comm.all_reduce(most, "max")
        self._stale.clear()
        return {"staleness": float(self._numbers[0]) * self.comm.size / self.workers, "staleness_most": float(most)}

    @property
    def split(self) -> Split | None:
        """Return that rank 0 speaks for what all ranks hold alike in a meeting."""
        return FirstRank(self.comm.rank)

    def detach(self) -> None:
        """Take all hooks off, leave the served parameters in the model, give the memory back; a call by all ranks."""
        attached = bool(self._handles)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if attached:
            if self._optimizer is not None:
                self._board.barrier()
                self._read()
                self._store.free()
            self._board.free()
