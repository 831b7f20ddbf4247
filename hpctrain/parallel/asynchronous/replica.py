"""Base class of strategies with a replica per worker: flat parameters, an optimizer, a centre and its update rules.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, equations 5 and
6. With worker i's parameters x_i, the centre x, and the moving rate alpha = learning rate x rho:

    x_i <- x_i - learning rate x gradient_i - alpha (x_i - x)
    x   <- x + alpha (sum over i of (x_i - x))

All values on the right are those before the update. Any optimizer makes the first part of a
worker's update; this module makes the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.hooks import WorkerHooks, WriteGuard, buffers_of, worker_state
from hpctrain.parallel.asynchronous.staleness import CommunicationTime
from hpctrain.parallel.model_agreement import broadcast_model, check_same_model, trainable
from hpctrain.parallel.strategy import AsyncStrategy, Metrics, broadcast_buffers

BETA = 0.9  # fraction of the distance by which all workers together move the centre, as the authors recommend


def moving_rate(rho: float, learning_rate: float, workers: int) -> float:
    """Return alpha; without a rho, the alpha by which all workers together move the centre by ``BETA``."""
    return learning_rate * rho if rho else BETA / workers


def pull_worker(worker: Tensor, centre: Tensor, alpha: float) -> None:
    """Move a worker towards the centre, in place."""
    worker.lerp_(centre, alpha)


def pull_centre(centre: Tensor, mean: Tensor, workers: int, alpha: float) -> None:
    """Move the centre towards the ``mean`` of ``workers`` workers, in place."""
    centre.lerp_(mean, alpha * workers)  # alpha (sum over i of (x_i - x)) equals alpha workers (mean - x)


# Flat vector of a model's parameters, so that they are communicated as one tensor -------------------------------------


class FlatParameters:
    """Trained parameters of a model as one vector, ``values``; the model's parameters become views of it."""

    def __init__(
        self,
        model: nn.Module,
        order: Sequence[nn.Parameter] = (),
        exclude: Collection[nn.Parameter] = (),
        *,
        staged: bool = False,
    ) -> None:
        """Flatten in an ``order``, or in the model's order; parameters in ``exclude`` stay unchanged.

        ``staged`` means that other ranks cannot access the values, as those of a GPU.
        """
        rank = {parameter: number for number, parameter in enumerate(order)}
        named = sorted(trainable(model), key=lambda item: rank.get(item[1], 0))
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
        excluded = set(exclude)
        named = [(name, parameter) for name, parameter in named if parameter not in excluded]
        total = sum(parameter.numel() for _, parameter in named)
        self.values = torch.empty(total, dtype=first.dtype, device=first.device)
        self.staged = staged or first.device.type != "cpu"
        self.slices: list[slice] = []
        self._parameters = [parameter for _, parameter in named]
        offset = 0
        for _, parameter in named:
            self.slices.append(slice(offset, offset + parameter.numel()))
            view = self.values[self.slices[-1]].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            offset += parameter.numel()

    def rebind(self, values: Tensor) -> None:
        """Make the parameters views of another vector, which already holds their values."""
        self.values = values
        for parameter, where in zip(self._parameters, self.slices):
            parameter.data = values[where].view(parameter.shape)

    def host(self) -> Tensor:
        """Return the values in host memory: the vector itself if it is there, else a copy."""
        if not self.staged:
            return self.values
        return torch.empty(self.values.shape, dtype=self.values.dtype).copy_(self.values)


# Base class of strategies with a replica per worker: flat parameters, an optimizer, a centre --------------------------


class Replica(AsyncStrategy):
    """Strategy of one worker with its own replica; checkpoints and evaluations use the centre."""

    has_local_state = True

    def __init__(
        self, model: nn.Module, comm: Communicator, settings: AsynchronousSettings, *, staged: bool = False
    ) -> None:
        super().__init__(model, comm)
        self.settings = settings
        check_same_model(model, comm)
        broadcast_model(model, comm)
        self._flat = FlatParameters(model, staged=staged)
        self._distance = comm.empty(1, torch.float64)
        self._steps = torch.zeros((), dtype=torch.int64)  # a tensor, so that a checkpoint restores it
        self._began = False  # whether the present step has begun
        self.exchanging = CommunicationTime()
        self._saved_parameters: Tensor | None = None  # this worker's parameters, while the model holds the centre
        self._hooks = WorkerHooks(model, self._on_forward, self._on_gradient, self.check_optimizer)
        self._writes = WriteGuard(model, "the centre of the workers")

    # Interface of an exchange -----------------------------------------------------------------------------------------

    @abstractmethod
    def centre(self) -> Tensor:
        """Return the centre, in host memory. Collective; no rank changes it meanwhile."""

    @abstractmethod
    def set_centre(self, values: Tensor) -> None:
        """Set the centre to these values, which are the same on all ranks. Collective."""

    def _begin(self) -> None:
        """Begin a step, before its first pass."""

    def _progress(self) -> None:
        """Make progress on a pending exchange, during the backward pass."""

    def _before_update(self) -> None:
        """Exchange before the optimizer's step: the parameters are still those of the gradient."""

    def _after_update(self) -> None:
        """Exchange after the optimizer's step; the step is already counted."""

    def _end_exchange(self) -> None:
        """End the exchange of a step that has begun and makes no update. Collective."""

    # A step -----------------------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register this worker's optimizer. Raises ``UsageError`` for a second one."""
        if not self._hooks.is_new(optimizer):
            return
        self._hooks.attach_optimizer(optimizer, self._on_step_begin, self._on_step_end)

    def _on_forward(self) -> None:
        if not self._began and self.model.training and torch.is_grad_enabled():
            self._begin_step()

    def _begin_step(self) -> None:
        self._began = True
        self.exchanging.begin_step()
        with self.exchanging:
            self._begin()

    def _on_gradient(self) -> None:
        with self.exchanging:
            self._progress()

    def _on_step_begin(self) -> None:
        if not self._began:  # without samples there was no pass
            self._begin_step()
        with self.exchanging:
            self._before_update()

    def _on_step_end(self) -> None:
        self._began = False
        self._steps += 1
        with self.exchanging:
            self._after_update()

    @property
    def _due(self) -> bool:
        """Return whether the present step, which is not counted yet, has an exchange."""
        return int(self._steps) % self.settings.period == 0

    @property
    def _alpha(self) -> float:
        """Return the moving rate of the present step."""
        assert self._hooks.optimizer is not None
        rates = {float(group["lr"]) for group in self._hooks.optimizer.param_groups}
        if len(rates) > 1 and self.settings.rho:
            raise UsageError(
                "asynchronous.rho needs a single learning rate, and the optimizer has several", everywhere=True
            )
        return moving_rate(self.settings.rho, rates.pop(), self.comm.size)

    # Common state of all workers --------------------------------------------------------------------------------------

    @contextmanager
    def consensus_view(self) -> Iterator[None]:
        """Put the centre, and rank 0's buffers, into the model for the ``with`` block. Collective."""
        if self._saved_parameters is not None:
            yield  # the model already holds the centre
            return
        self.exchanging.pause()
        self.sync_count += 1
        values, centre = self._flat.values, self.centre()
        self._saved_parameters = values.clone()
        buffers = {name: one.clone() for name, one in buffers_of(self.model).items()}
        values.copy_(centre)
        broadcast_buffers(self.model, self.comm)
        try:
            yield
        finally:
            values.copy_(self._saved_parameters)
            self._saved_parameters = None
            for name, one in buffers_of(self.model).items():
                one.copy_(buffers[name])

    @contextmanager
    def unshard(self, *, write: bool = False) -> Iterator[None]:
        """Let all ranks write if ``write`` is set; centre and workers continue from rank 0's values. Collective."""
        if not write:
            yield
            return
        with self.consensus_view(), self._writes.allowing():
            yield
            broadcast_model(self.model, self.comm)
            self._end_exchange()
            self.refresh()
            if self._saved_parameters is not None:
                self._saved_parameters.copy_(self._flat.values)
            buffers = {name: one.clone() for name, one in buffers_of(self.model).items()}
        for name, one in buffers_of(self.model).items():  # the view has restored this worker's own buffers
            one.copy_(buffers[name])

    def drain(self) -> None:
        """Exclude the time until the next step from the measured time."""
        self.exchanging.pause()

    def conclude(self) -> None:
        """Leave the centre, and rank 0's buffers, in the model of every rank. Collective.

        The next step starts from these values; a worker's own parameters are only in the run's last
        checkpoint.
        """
        if self._saved_parameters is not None:
            return  # the model already holds the centre
        self.drain()
        self._end_exchange()
        self._began = False
        self._flat.values.copy_(self.centre())
        broadcast_buffers(self.model, self.comm)

    def metrics(self) -> Metrics:
        """Return the mean distance from the centre, and the mean fraction of time for exchanges. Collective."""
        self.exchanging.pause()
        self._distance[0] = torch.dist(self._flat.host(), self.centre())
        self.comm.all_reduce(self._distance, "average")
        return {"centre_distance": float(self._distance[0]), **self.exchanging.metrics(self.comm)}

    def rank_local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the tensors in which this worker differs from the others, to be saved and filled in place."""
        values = self._flat.values if self._saved_parameters is None else self._saved_parameters
        return {"parameters": values, "steps": self._steps, **worker_state(self.model, optimizer)}

    def refresh(self) -> None:
        """Set the centre to the model's current parameters. Collective."""
        self.set_centre(self._flat.host())
        self._began = False

    def detach(self) -> None:
        """Remove all hooks from the module, and leave the centre and rank 0's buffers in it. Collective."""
        if self._hooks.attached:
            self.conclude()
        self._hooks.remove()
        self._writes.close()
