"""Parameter server in memory that all ranks can access: workers read and update the parameters at their own pace.

After Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (Downpour SGD), and Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013 (the
bound). There is no server process. The owners of a part are workers, or ranks without other work
(``asynchronous.ranks``). A worker makes its update in the memory of the part (``store``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.rma.remote_memory import RemoteMemory
from hpctrain.comm.rma.select import expose
from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.remote_store import Store
from hpctrain.parallel.asynchronous.sparse import RowReader, average_rows, find_tables
from hpctrain.parallel.asynchronous.staleness import Bound, check_bound
from hpctrain.parallel.asynchronous.worker import AsyncWorker, FlatParameters, WriteGuard
from hpctrain.parallel.model_agreement import trainable
from hpctrain.parallel.objective import CallArguments, Objective
from hpctrain.parallel.strategy import ModelGradients


class ServedVector(FlatParameters):
    """Dense parameters as one vector on the model's device, and their gradients as one in host memory.

    Note: staging. On a GPU (or if ``staged``), both have an additional staging vector, so that a step makes one copy
    in each direction. Remote memory is read into ``host``. Gradients are first flattened on the
    device.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, staged: bool = False) -> None:
        self._names = {parameter: name for name, parameter in trainable(model)}
        groups = [[one for one in group["params"] if one in self._names] for group in optimizer.param_groups]
        given = dict.fromkeys(parameter for group in groups for parameter in group)
        for parameter, name in self._names.items():
            if parameter not in given:
                raise UsageError(
                    f"the optimizer does not have the parameter {name}: a server updates all", everywhere=True
                )
        self.tables = find_tables(model)
        self.rows: list[Tensor | None] = [None for _ in self.tables]
        dense = given.keys() - {table.parameter for table in self.tables}
        super().__init__(model, [parameter for parameter in given if parameter in dense], staged=staged)
        self.groups = [sum(one.numel() for one in group if one in dense) for group in groups]
        self.gradient = self._on_host()
        self.host = self._on_host().copy_(self.values) if self.staged else self.values
        self.device_gradient = torch.empty_like(self.values) if self.staged else self.gradient

    def _on_host(self) -> Tensor:
        return torch.zeros(self.values.shape, dtype=self.values.dtype, pin_memory=self.values.is_cuda)

    def load_host(self) -> None:
        """Set the parameters to the contents of ``host``."""
        if self.staged:
            self.values.copy_(self.host)

    def to_host(self) -> Tensor:
        """Return the parameters in host memory, in ``host``."""
        return self.host.copy_(self.values) if self.staged else self.values

    def collect(self) -> bool:
        """Move the gradients out of the parameters; return whether there were any."""
        found = any(parameter.grad is not None for parameter in self.parameters)
        self.copy_gradients(self.gradient)
        for parameter in self.parameters:
            parameter.grad = None
        self.rows = [table.gradient() for table in self.tables]
        return found or any(rows is not None for rows in self.rows)

    def norm(self) -> Tensor:
        gradients = [self.gradient, *(rows.values() for rows in self.rows if rows is not None)]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
        return norm

    def copy_gradients(self, out: Tensor) -> None:
        """Copy the dense gradients to host memory, with zeros for missing ones."""
        target = self.device_gradient if self.staged else out
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
        if self.staged:
            out.copy_(target)

    def set_gradients(self, gradients: Tensor) -> None:
        """Set the parameters' gradients to dense gradients from host memory."""
        target = self.device_gradient.copy_(gradients) if self.staged else gradients
        for parameter, view in zip(self.parameters, self.views(target)):
            parameter.grad = view


class ServedGradients(ModelGradients):
    """Gradients of a worker: in its parameters, or ``collected`` for an update of the served parameters."""

    collected = False

    def drop(self) -> None:
        super().drop()
        self.collected = False


class ParameterServer(AsyncWorker):
    """Parameter-server strategy of a worker, or of a rank that only holds parameters.

    In synchronous mode, gradients are averaged at the end of the backward pass, and each owner
    updates its own part.
    """

    gradients: ServedGradients
    memory: RemoteMemory  # counters of all workers' updates

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        settings: AsynchronousSettings = AsynchronousSettings(),
        *,
        staged: bool = False,
    ) -> None:
        self.workers = comm.size - settings.ranks
        check_bound(settings.max_staleness, self.workers)
        super().__init__(model, comm, settings)
        self.gradients, self._staged = ServedGradients(model), staged
        self.asynchronous = settings.mode != "synchronous"
        self.computes = comm.rank < self.workers
        self._data = comm.split(int(not self.computes)) if settings.ranks else comm
        self.memory = expose(comm.transport, 0, torch.float32, Bound.words(self.workers))
        self._bound = Bound(self.memory, self.workers, settings.max_staleness)
        self._average_queued = False
        self._register_hooks()
        self._writes = WriteGuard(model, "the parameter server")
        self._handles += self._writes.handles
        self._writes.allowed = True  # until a run begins, which then serves the current values

    @property
    def data(self) -> Communicator:
        """Return the communicator of the workers, which share the samples; on parameter-only ranks, theirs."""
        return self._data

    # A step -----------------------------------------------------------------------------------------------------------

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Allocate the served parameters and states. Raises ``UsageError`` for an optimizer that cannot be served."""
        self._vector = ServedVector(self.model, optimizer, staged=self._staged)
        self._sum = self.comm.empty(self._vector.gradient.numel(), self._vector.gradient.dtype)
        owners = range(self.workers if self.settings.ranks else 0, self.comm.size)
        self.store = Store(self.comm.transport, optimizer, self._vector, owners)
        self._row_reader = RowReader(self._vector.tables, self._read_rows)
        self._handles += self._row_reader.handles
        # Each rank begins with another part, so that they do not all access the same one.
        self._order = [owners[(self.comm.rank + step) % len(owners)] for step in range(len(owners))]
        self.store.write_own(self._vector.to_host())
        self.memory.barrier()
        self._writes.allowed = False
        self._writes.record()

    def _on_unknown_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError``: memory for served parameters is allocated when a run begins, and does not exist yet."""
        raise UsageError(
            f'{type(optimizer).__name__}.step() outside of a run under parallel.data = "server": updates are served in '
            "the loop of a run only; write `with job.run(model, optimizer, loader, ...) as run`",
            everywhere=True,
        )

    def forward_backward(self, inputs: Any, targets: Any, objective: Objective, *, weight: float = 1.0) -> Tensor:
        """Accumulate gradients in the parameters, if this rank is a worker; return the loss."""
        if not self.computes:
            return torch.zeros((), device=CallArguments.of(inputs).device)
        return super().forward_backward(inputs, targets, objective, weight=weight)

    def _begin_step(self) -> None:
        if self._optimizer is not None:  # otherwise no run has begun: all ranks hold the initial values
            super()._begin_step()

    def _begin(self) -> None:
        self._writes.check()
        self._bound.read()
        self._read()

    def _read(self, *, tables: bool = False) -> None:
        """Read the dense parameters, and whole tables with ``tables``; otherwise passes read the rows they look up."""
        self.store.read(self._vector.host)
        self._vector.load_host()
        self._writes.record()
        self._row_reader.invalidate()
        if tables:
            for number, table in enumerate(self._vector.tables):
                table.parameter.data.copy_(self.store.read_table(number))
            self._row_reader.mark_all_valid()

    def _read_rows(self, table: int, rows: Tensor) -> Tensor:
        with self.exchanging:
            return self.store.read_rows(table, rows)

    def _on_gradient(self, parameter: Tensor) -> None:
        if self.asynchronous:
            super()._on_gradient(parameter)
        elif self._syncing and not self._average_queued:
            self._average_queued = True
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """Replace all workers' gradients by their mean, in place."""
        self._average_queued = False
        with self.exchanging:
            self.memory.barrier()  # serves remote reads here, outside a collective
            if self._sum.numel():
                self._vector.copy_gradients(self._sum)
                self.comm.all_reduce(self._sum, "average")
                self._vector.set_gradients(self._sum)
            if self._vector.tables:
                average_rows(self._vector.tables, self.comm)

    def _on_step_begin(self) -> None:
        """Move the gradients out of the parameters, so that the local optimizer step does nothing."""
        self.gradients.collected = self._vector.collect()

    def _on_step_end(self) -> None:
        """Make the update of the served parameters, unless the gradients were dropped."""
        with self.exchanging:
            if self.gradients.collected and not self.asynchronous:
                self._bound.cancel()
                self.store.update_own()
                self.memory.barrier()
            elif self.gradients.collected and self.computes:
                self._bound.admit()
                self.store.update(self._order, locked=self.settings.lock)
                self._staleness.record(self._bound.count())
            elif self._began:
                self._bound.cancel()
        self._began = self.gradients.collected = False

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale this worker's gradients so that their norm is at most ``max_norm``; return their norm before."""
        if self.gradients.collected:  # the optimizer's step has begun: only the norm is requested
            return self._vector.norm()
        return super().clip_grad_norm(max_norm)

    def join_empty(self, *, backward: bool = True) -> None:
        """Take no part in a pass of the others; contribute zeros if gradients are averaged."""
        if backward and not self.asynchronous:
            self._on_forward()
            self._average()

    # Common state of all workers --------------------------------------------------------------------------------------

    @contextmanager
    def consensus_view(self) -> Iterator[None]:
        """Put served parameters into the model, and their states into the optimizer, for the block. Collective."""
        assert self._optimizer is not None
        self.exchanging.pause()
        self.sync_count += 1
        self._writes.check()
        self.memory.barrier()
        self._read(tables=True)
        self.store.export_states(self._optimizer)
        self.memory.barrier()
        try:
            yield
        finally:
            self._optimizer.state.clear()

    @contextmanager
    def unshard(self, *, write: bool = False) -> Iterator[None]:
        """Let all ranks write if ``write`` is set; rank 0's values are served from then on. Collective."""
        if not write or self._optimizer is None:
            yield
            return
        with self._writes.allowing(), super().unshard(write=True):
            yield

    def conclude(self) -> None:
        if self._optimizer is not None:
            super().conclude()

    def refresh(self) -> None:
        """Serve the current parameters of the model and states of the optimizer. Collective."""
        if self._optimizer is None:
            return
        self.memory.barrier()
        self.store.write_own(self._vector.to_host())
        self.store.import_states(self._optimizer)
        self._optimizer.state.clear()
        self._row_reader.mark_all_valid()
        self._writes.record()
        self.memory.barrier()

    def _release(self) -> None:
        if self._optimizer is not None:
            self.store.free()
        super()._release()
