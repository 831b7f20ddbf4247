"""EASGD: a replica on every rank, and elastic averaging of the workers with a centre, together or one by one.

After You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017:
all parameters are sent as one message, an all_reduce sums them, and it overlaps with the passes.

Note: what overlaps. The pull on a worker depends on its parameters before the step, and not on its
gradient. A step therefore begins with a copy of the parameters into the window and the start of
their all_reduce. Hooks of the backward pass make progress on it. The result is available just
before the optimizer's update, and worker and centre are pulled. Every rank holds the centre and
moves it by the same numbers. It is therefore the same everywhere, and no rank is dedicated to it.

The update rules are equations 5 and 6 of Zhang, Choromanska and LeCun, "Deep learning with Elastic
Averaging SGD", NIPS 2015. With worker i's parameters x_i, the centre x, and the moving rate alpha =
learning rate x rho:

    x_i <- x_i - learning rate x gradient_i - alpha (x_i - x)
    x   <- x + alpha (sum over i of (x_i - x))

All values on the right are those before the update. Any optimizer makes the first part of a
worker's update; this module makes the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.rma.remote_memory import WORDS, Lock, RemoteMemory
from hpctrain.comm.rma.select import expose
from hpctrain.comm.transport.base import Work
from hpctrain.comm.transport.waiting import SPINS, timeout_seconds, until, waiting
from hpctrain.errors import UsageError
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.worker import AsyncWorker, FlatParameters, WriteGuard, buffers_of, worker_state
from hpctrain.parallel.clip import clip_whole_gradients
from hpctrain.parallel.model_agreement import broadcast_model
from hpctrain.parallel.strategy import Metrics, broadcast_buffers

BETA = 0.9  # fraction of the distance by which all workers together move the centre, as the authors recommend


class Replica(AsyncWorker):
    """Strategy of one worker with its own replica; checkpoints and evaluations use the centre."""

    has_local_state = True

    def __init__(
        self, model: nn.Module, comm: Communicator, settings: AsynchronousSettings, *, staged: bool = False
    ) -> None:
        super().__init__(model, comm, settings)
        self._flat = FlatParameters(model, staged=staged)
        self._distance = comm.empty(1, torch.float64)
        self._steps = torch.zeros((), dtype=torch.int64)  # a tensor, so that a checkpoint restores it
        self._saved: list[Tensor] = []  # this worker's parameters and buffers, while the model holds the centre
        self._writes = WriteGuard(model, "the centre of the workers")
        self._handles += self._writes.handles
        self._register_hooks()

    # Interface of an exchange -----------------------------------------------------------------------------------------

    @abstractmethod
    def centre(self) -> Tensor:
        """Return the centre, in host memory. Collective; no rank changes it meanwhile."""

    @abstractmethod
    def set_centre(self, values: Tensor) -> None:
        """Set the centre to these values, which are the same on all ranks. Collective."""

    def _before_update(self) -> None:
        """Exchange before the optimizer's step: the parameters are still those of the gradient."""

    def _after_update(self) -> None:
        """Exchange after the optimizer's step; the step is already counted."""

    def _end_exchange(self) -> None:
        """End the exchange of a step that has begun and makes no update. Collective."""

    # A step -----------------------------------------------------------------------------------------------------------

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
        """Return the present moving rate; without a rho, all workers together move the centre by ``BETA``."""
        assert self._optimizer is not None
        rates = {float(group["lr"]) for group in self._optimizer.param_groups}
        if len(rates) > 1 and self.settings.rho:
            raise UsageError(
                "asynchronous.rho needs a single learning rate, and the optimizer has several", everywhere=True
            )
        return rates.pop() * self.settings.rho if self.settings.rho else BETA / self.comm.size

    # Common state of all workers --------------------------------------------------------------------------------------

    def _own_tensors(self) -> list[Tensor]:
        return [self._flat.values, *buffers_of(self.model).values()]

    @contextmanager
    def consensus_view(self) -> Iterator[None]:
        """Put the centre, and rank 0's buffers, into the model for the ``with`` block. Collective."""
        if self._saved:
            yield  # the model already holds the centre
            return
        self.exchanging.pause()
        self.sync_count += 1
        centre = self.centre()
        self._saved = [one.clone() for one in self._own_tensors()]
        self._flat.values.copy_(centre)
        broadcast_buffers(self.model, self.comm)
        try:
            yield
        finally:
            for one, saved in zip(self._own_tensors(), self._saved):
                one.copy_(saved)
            self._saved = []

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
            for one, saved in zip(self._own_tensors(), self._saved):
                saved.copy_(one)

    def conclude(self) -> None:
        """Leave the centre, and rank 0's buffers, in the model of every rank. Collective.

        The next step starts from these values; a worker's own parameters are only in the run's last
        checkpoint.
        """
        if self._saved:
            return  # the model already holds the centre
        self.drain()
        self._end_exchange()
        self._began = False
        self._flat.values.copy_(self.centre())
        broadcast_buffers(self.model, self.comm)

    def metrics(self) -> Metrics:
        """Return the mean distance from the centre, and the mean fraction of time for exchanges. Collective."""
        self.exchanging.pause()
        self._distance[0] = torch.dist(self._flat.to_host(), self.centre())
        self.comm.all_reduce(self._distance, "average")
        return {"centre_distance": float(self._distance[0]), **self.exchanging.metrics(self.comm)}

    def rank_local_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        values = self._saved[0] if self._saved else self._flat.values
        return {"parameters": values, "steps": self._steps, **worker_state(self.model, optimizer)}

    def refresh(self) -> None:
        self.set_centre(self._flat.to_host())
        self._began = False


class ElasticAveraging(Replica):
    """EASGD strategy: all workers exchange with the centre together, or take their average every ``period`` steps."""

    def __init__(
        self, model: nn.Module, comm: Communicator, settings: AsynchronousSettings = AsynchronousSettings()
    ) -> None:
        super().__init__(model, comm, settings)
        self._centre = self._flat.to_host().clone()
        self._mean = comm.empty(self._centre.numel(), self._centre.dtype)
        self._finite = comm.empty(1, torch.float32)
        self._work: Work | None = None

    def _begin(self) -> None:
        """Start the mean of all workers' parameters, if this step has an exchange."""
        if self._due and not self.settings.average:
            self._mean.copy_(self._flat.values)
            work = self.comm.all_reduce(self._mean, "average", async_op=True)
            assert not isinstance(work, Tensor)
            self._work = work

    def _progress(self) -> None:
        if self._work is not None:
            self._work.done()

    def _before_update(self) -> None:
        """Pull worker and centre."""
        if self._work is None:
            return
        self._end_exchange()
        alpha = self._alpha
        self._flat.values.lerp_(self._centre.to(self._flat.values.device), alpha)
        # alpha (sum over i of (x_i - x)) equals alpha workers (mean - x)
        self._centre.lerp_(self._mean, alpha * self.comm.size)

    def _after_update(self) -> None:
        """Replace the parameters by the average of all workers if local SGD is due."""
        if self.settings.average and self._due:
            self._flat.values.copy_(self._average())
            self._centre.copy_(self._mean)

    def _end_exchange(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _average(self) -> Tensor:
        self._mean.copy_(self._flat.values)
        self.comm.all_reduce(self._mean, "average")
        return self._mean

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale this worker's gradients so that their norm is at most ``max_norm``; return their norm before, a scalar.

        If the norm of any worker is not finite, all workers return NaN.
        """
        norm = clip_whole_gradients(self.model, max_norm)
        self._finite[0] = float(not bool(torch.isfinite(norm)))
        with self.exchanging:
            self.comm.all_reduce(self._finite, "max")
        return norm if not float(self._finite[0]) else torch.full_like(norm, float("nan"))

    def centre(self) -> Tensor:
        """Return the centre; for local SGD, the current average of the workers."""
        return self._average() if self.settings.average else self._centre

    def set_centre(self, values: Tensor) -> None:
        self._centre.copy_(values)
        self._work = None


# Asynchronous EASGD: each worker exchanges with the centre at its own pace, or by turns -------------------------------
#
# Algorithm 1 of the same paper. The centre is in memory that all ranks expose, one part per rank, so no
# rank is dedicated to it. For an exchange, a worker locks a part, reads it, adds its pull and unlocks.
# No pull is lost, and other workers wait at most for the processing of one part.
#
# Note: turns. In the first version of the method, only worker t mod p exchanges in round t. A counter
# holds the current turn, and every worker waits for its own. This mode is kept for comparison.


_TURN_WORD = WORDS  # the counter of rank 0 after those of its lock


class AsyncElasticAveraging(Replica):
    """EASGD strategy in which a worker exchanges with the centre when it is ready, or when it has its turn."""

    asynchronous = True
    memory: RemoteMemory

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        settings: AsynchronousSettings = AsynchronousSettings(),
        *,
        staged: bool = False,
    ) -> None:
        super().__init__(model, comm, settings, staged=staged)
        total, size = self._flat.values.numel(), comm.size
        self._slices = [slice(total * rank // size, total * (rank + 1) // size) for rank in range(size)]
        own = self._slices[comm.rank]
        self.memory = expose(comm.transport, own.stop - own.start, self._flat.values.dtype, WORDS + 1)
        self._lock = Lock(self.memory)
        self._last_exchange = -1  # index of this worker's last exchange, among all exchanges of its own part
        # Each worker begins with its own part, so that they do not all contend for the same lock.
        self._order = [(comm.rank + step) % size for step in range(size)]
        self.set_centre(self._flat.to_host())

    def _before_update(self) -> None:
        """Pull worker and centre, if this step has an exchange."""
        if not self._due:
            return
        if self.settings.mode == "round-robin":
            self._wait_for_turn()
        alpha = self._alpha
        values = self._flat.to_host()
        for owner in self._order:
            self._exchange(owner, alpha, values[self._slices[owner]])
        if values is not self._flat.values:  # a step makes one copy in each direction
            self._flat.values.copy_(values)
        if self.settings.mode == "round-robin":
            self.memory.fetch_add(0, _TURN_WORD, 1)

    def _exchange(self, owner: int, alpha: float, own: Tensor) -> None:
        with self._lock.of(owner) as number:
            centre = self.memory.view(owner)
            if centre is None:
                centre = torch.empty_like(own)
                self.memory.get(owner, centre)
            pull = (own - centre).mul_(alpha)
            self.memory.add(owner, pull)
        own.sub_(pull)
        if owner == self.comm.rank:  # every exchange includes every part, so counting at the own part needs no message
            self._staleness.record(number - self._last_exchange - 1)
            self._last_exchange = number

    def _wait_for_turn(self) -> None:
        operation = "its turn to exchange with the centre"
        with waiting(operation):
            until(self._has_turn, operation, self._timeout_message, SPINS, period=1)

    def _has_turn(self) -> bool:
        self.memory.progress()
        return self.memory.fetch_add(0, _TURN_WORD) % self.comm.size == self.comm.rank

    def _timeout_message(self) -> str:
        turn = self.memory.fetch_add(0, _TURN_WORD) % self.comm.size
        waited = f"rank {self.comm.rank} waited {timeout_seconds():g} s (HPCTRAIN_TIMEOUT) for its turn"
        return f"{waited}: it is rank {turn}'s"

    def centre(self) -> Tensor:
        self.memory.barrier()
        whole = torch.empty(self._flat.values.shape, dtype=self._flat.values.dtype)
        for owner, where in enumerate(self._slices):
            self.memory.get(owner, whole[where])
        self.memory.barrier()  # no rank changes the centre before all have read it
        return whole

    def metrics(self) -> Metrics:
        """Return the metrics of ``Replica``, and the number of others' exchanges between two own ones. Collective."""
        return {**super().metrics(), **self._staleness.metrics(self.comm)}

    def set_centre(self, values: Tensor) -> None:
        self.memory.barrier()
        self.memory.put(self.comm.rank, values[self._slices[self.comm.rank]])
        self.memory.barrier()
