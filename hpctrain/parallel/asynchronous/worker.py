"""Base class of workers that make their own updates, their parameters as one vector, and their state in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.rma.remote_memory import RemoteMemory
from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.staleness import CommunicationTime, StalenessHistogram
from hpctrain.parallel.compiled import ModuleHook
from hpctrain.parallel.hooks import StepHooks, after_gradient, parameters_of
from hpctrain.parallel.model_agreement import broadcast_model, check_same_model, trainable
from hpctrain.parallel.strategy import AsyncStrategy, Metrics, broadcast_buffers


class AsyncWorker(AsyncStrategy):
    """Strategy of one worker with one optimizer: its hooks, its steps, and the measurement of its exchanges."""

    memory: RemoteMemory | None = None  # that all ranks access, if there is any

    def __init__(self, model: nn.Module, comm: Communicator, settings: AsynchronousSettings) -> None:
        """Start from rank 0's model. Collective; subclasses call ``_register_hooks`` at the end."""
        super().__init__(model, comm)
        self.settings = settings
        check_same_model(model, comm)
        broadcast_model(model, comm)
        self._staleness, self.exchanging = StalenessHistogram(), CommunicationTime()
        self._began = False  # whether the present step has begun
        self._optimizer: torch.optim.Optimizer | None = None
        self._trainable = trainable(model)
        self._handles: list[RemovableHandle | StepHooks] = []

    def _register_hooks(self) -> None:
        self._handles.append(self.model.register_forward_pre_hook(ModuleHook(lambda *_: self._on_forward())))
        self._handles += [after_gradient(parameter, self._on_gradient) for _, parameter in self._trainable]
        self._handles.append(StepHooks(self, AsyncWorker._before_any_step))

    # A step -----------------------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register this worker's optimizer. Raises ``UsageError`` for a second one."""
        if self._optimizer is optimizer:
            return
        if self._optimizer is not None:
            raise UsageError("a worker moves by one optimizer: call job.wrap(model) again for another", everywhere=True)
        self._adopt(optimizer)
        self._optimizer = optimizer
        self._handles += [
            optimizer.register_step_pre_hook(lambda *_: self._on_step_begin()),
            optimizer.register_step_post_hook(lambda *_: self._on_step_end()),
        ]

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare for the updates of this worker's optimizer. Raises ``UsageError`` for an unsuitable one."""

    def _before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizer is None:
            held = {id(parameter) for _, parameter in self._trainable}
            if any(id(parameter) in held for parameter in parameters_of(optimizer)):
                self._on_unknown_optimizer(optimizer)

    def _on_unknown_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the optimizer of a script without a run; otherwise its workers would never exchange."""
        self.check_optimizer(optimizer)

    def _on_forward(self) -> None:
        if not self._began and self.model.training and torch.is_grad_enabled():
            self._begin_step()

    def _begin_step(self) -> None:
        self._began = True
        self.exchanging.begin_step()
        with self.exchanging:
            self._begin()

    def _begin(self) -> None:
        """Begin a step, before its first pass."""

    def _on_gradient(self, parameter: Tensor) -> None:
        with self.exchanging:
            self._progress()

    def _progress(self) -> None:
        """Make progress on exchanges, during the backward pass."""
        if self.memory is not None:
            self.memory.progress()

    @abstractmethod
    def _on_step_begin(self) -> None:
        """Prepare for the update of the optimizer."""

    @abstractmethod
    def _on_step_end(self) -> None:
        """End a step, after the update of the optimizer."""

    # Common state of all workers --------------------------------------------------------------------------------------

    @contextmanager
    def unshard(self, *, write: bool = False) -> Iterator[None]:
        """Let all ranks write if ``write`` is set; all workers continue from rank 0's values. Collective."""
        if not write:
            yield
            return
        with self.consensus_view():
            yield
            broadcast_model(self.model, self.comm)
            self.refresh()

    def drain(self) -> None:
        """Pause the measurement until the next step; wait for all ranks, and serve their accesses. Collective."""
        self.exchanging.pause()
        if self.memory is not None:
            self.memory.barrier()

    def conclude(self) -> None:
        """Leave the consensus state, and rank 0's buffers, in the model of every rank. Collective."""
        with self.consensus_view():
            broadcast_buffers(self.model, self.comm)

    def metrics(self) -> Metrics:
        """Return the staleness of updates, and the fraction of time spent on communication. Collective."""
        self.drain()  # ranks that still update may need this rank's progress
        return {**self._staleness.metrics(self.comm), **self.exchanging.metrics(self.comm, computes=self.computes)}

    def detach(self) -> None:
        """Remove all hooks, leave the result of ``conclude`` in the model, and free the memory. Collective."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self.conclude()
            self._release()

    def _release(self) -> None:
        if self.memory is not None:
            self.memory.free()


class FlatParameters:
    """Trained parameters of a model as one vector, ``values``, for communication; they become views of it."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None, *, staged: bool = False
    ) -> None:
        """Flatten some trained ``parameters``, in this order; all of the model by default.

        ``staged`` means that other ranks cannot access the values, as those of a GPU.
        """
        named = trainable(model)
        if not named:
            raise UsageError("the model has no parameter that requires a gradient", everywhere=True)
        first = named[0][1]
        for name, parameter in named:
            if parameter.dtype is not first.dtype or parameter.dtype not in (torch.float32, torch.float64):
                raise UsageError(
                    f"the parameter {name} is of {parameter.dtype}, {named[0][0]} of {first.dtype}: replicas that "
                    "differ need all of them in float32, or all in float64; for narrower passes set train.precision",
                    everywhere=True,
                )
        self.parameters = [parameter for _, parameter in named] if parameters is None else list(parameters)
        ends = [0, *accumulate(parameter.numel() for parameter in self.parameters)]
        self.slices = [slice(begin, end) for begin, end in zip(ends, ends[1:])]
        self.staged = staged or first.device.type != "cpu"
        values = torch.empty(ends[-1], dtype=first.dtype, device=first.device)
        for parameter, view in zip(self.parameters, self.views(values)):
            view.copy_(parameter.data)
        self.rebind(values)

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the views of a vector that belong to each parameter, in their shapes."""
        return [vector[index].view(parameter.shape) for parameter, index in zip(self.parameters, self.slices)]

    def rebind(self, values: Tensor) -> None:
        """Make the parameters views of another vector, which already holds their values."""
        self.values = values
        for parameter, view in zip(self.parameters, self.views(values)):
            parameter.data = view

    def to_host(self) -> Tensor:
        """Return the values in host memory: the vector itself if it is there, else a copy."""
        if not self.staged:
            return self.values
        return torch.empty(self.values.shape, dtype=self.values.dtype).copy_(self.values)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint contains, by name."""
    saved = model.state_dict(keep_vars=True)
    return {name: one for name, one in model.named_buffers() if name in saved}


def worker_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a worker's buffers and the tensors of its optimizer states, under separate names."""
    found = {f"buffer.{name}": one for name, one in buffers_of(model).items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, states in optimizer.state.items():
        for key, value in states.items():
            if isinstance(value, Tensor):
                found[f"optimizer.{names[parameter]}.{key}"] = value
    return found


# Detection of a program's writes to parameters that come from servers or from a centre --------------------------------
#
# The next step, or the end of the run, overwrites such parameters, so a program's writes would be
# lost silently. ``job.unshard(model, write=True)`` is the supported way to write.


_ADVICE = "allowed is, on all ranks, with job.unshard(model, write=True): ..., in which rank 0's values count"


class WriteGuard:
    """Guard against a program's writes to parameters where they would be lost; ``source`` names their source."""

    def __init__(self, model: nn.Module, source: str) -> None:
        self._source = source
        self._parameters = trainable(model)
        self._versions: list[int] = []
        self.allowed = False  # whether writes count
        modules: list[Any] = list(model.modules())
        self.handles: list[RemovableHandle] = [
            module.register_load_state_dict_pre_hook(ModuleHook(self._on_load)) for module in modules
        ]

    @contextmanager
    def allowing(self) -> Iterator[None]:
        before, self.allowed = self.allowed, True
        try:
            yield
        finally:
            self.allowed = before

    def record(self) -> None:
        """Record the current versions of the parameters as valid."""
        self._versions = [parameter._version for _, parameter in self._parameters]

    def check(self) -> None:
        """Raise ``UsageError`` if the program has changed parameters in place since ``record``."""
        now = [parameter._version for _, parameter in self._parameters]
        if not self._versions or now == self._versions:
            return
        changed = [name for (name, _), one, other in zip(self._parameters, now, self._versions) if one != other]
        self._versions = now
        raise UsageError(
            f"parameters {', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''} were changed in place by the "
            f"program: they come from {self._source}, and the change would be lost; {_ADVICE}"
        )

    def _on_load(self, *_: Any) -> None:
        if not self.allowed:
            raise UsageError(
                f"load_state_dict of a model whose parameters come from {self._source}: what it loads would be lost; "
                f"{_ADVICE}; or load before job.wrap(model)"
            )
