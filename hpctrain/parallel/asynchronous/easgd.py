"""EASGD: a replica on every rank, and elastic averaging of the workers with a centre, together or one by one.

After You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017:
all parameters are sent as one message, an all_reduce sums them, and it overlaps with the passes.

Note: what overlaps. The pull on a worker depends on its parameters before the step, and not on its
gradient. A step therefore begins with a copy of the parameters into the window and the start of
their all_reduce. Hooks of the backward pass make progress on it. The result is available just
before the optimizer's update, and worker and centre are pulled. Every rank holds the centre and
moves it by the same numbers. It is therefore the same everywhere, and no rank is dedicated to it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.rma.remote_memory import WORDS, Lock
from hpctrain.comm.rma.select import expose
from hpctrain.comm.transport.base import Work
from hpctrain.comm.transport.waiting import SPINS, timeout_seconds, until, waiting
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.replica import Replica, pull_centre, pull_worker
from hpctrain.parallel.asynchronous.staleness import StalenessHistogram
from hpctrain.parallel.clip import clip_whole_gradients
from hpctrain.parallel.strategy import Metrics


class ElasticAveraging(Replica):
    """EASGD strategy: all workers exchange with the centre together, or take their average every ``period`` steps."""

    def __init__(
        self, model: nn.Module, comm: Communicator, settings: AsynchronousSettings = AsynchronousSettings()
    ) -> None:
        super().__init__(model, comm, settings)
        self._centre = self._flat.host().clone()
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
        self._work.wait()
        self._work = None
        alpha = self._alpha
        pull_worker(self._flat.values, self._centre.to(self._flat.values.device), alpha)
        pull_centre(self._centre, self._mean, self.comm.size, alpha)

    def _after_update(self) -> None:
        """Replace the parameters by the average of all workers if local SGD is due."""
        if self.settings.average and self._due:
            self._flat.values.copy_(self._average())
            self._centre.copy_(self._mean)

    def _end_exchange(self) -> None:
        """Wait for the pending mean, and drop it."""
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
        """Set the centre to these values."""
        self._centre.copy_(values)
        self._work = None


# Asynchronous EASGD: each worker exchanges with the centre at its own pace, or by turns -------------------------------
#
# Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, algorithm 1.
# The centre is in memory that all ranks expose, one part per rank, so no rank is dedicated to it. For
# an exchange, a worker locks a part, reads it, adds its pull and unlocks. No pull is lost, and other
# workers wait at most for the processing of one part.
#
# Note: turns. In the first version of the method, only worker t mod p exchanges in round t. A counter
# holds the current turn, and every worker waits for its own. This mode is kept for comparison.


_TURN_WORD = WORDS  # the counter of rank 0 after those of its lock


class AsyncElasticAveraging(Replica):
    """EASGD strategy in which a worker exchanges with the centre when it is ready, or when it has its turn."""

    asynchronous = True

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
        self._staleness = StalenessHistogram()
        self._last_exchange = -1  # index of this worker's last exchange, among all exchanges of its own part
        # Each worker begins with its own part, so that they do not all contend for the same lock.
        self._order = [(comm.rank + step) % size for step in range(size)]
        self.set_centre(self._flat.host())

    def _progress(self) -> None:
        self.memory.progress()

    def _before_update(self) -> None:
        """Pull worker and centre, if this step has an exchange."""
        if not self._due:
            return
        if self.settings.mode == "round-robin":
            self._wait_for_turn()
        alpha = self._alpha
        values = self._flat.host()
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
        """Return the centre. Collective."""
        self.memory.barrier()
        whole = torch.empty(self._flat.values.shape, dtype=self._flat.values.dtype)
        for owner, where in enumerate(self._slices):
            self.memory.get(owner, whole[where])
        self.memory.barrier()  # no rank changes the centre before all have read it
        return whole

    def metrics(self) -> Metrics:
        """Return the metrics of ``Replica``, and the number of others' exchanges between two own ones. Collective."""
        return {**super().metrics(), **self._staleness.metrics(self.comm)}

    def drain(self) -> None:
        """Wait for all ranks, and serve their accesses meanwhile. Collective."""
        super().drain()
        self.memory.barrier()

    def set_centre(self, values: Tensor) -> None:
        """Set the centre to these values. Collective."""
        self.memory.barrier()
        self.memory.put(self.comm.rank, values[self._slices[self.comm.rank]])
        self.memory.barrier()

    def detach(self) -> None:
        """Remove all hooks from the module, leave the centre in it, and free the centre's memory. Collective."""
        attached = self._hooks.attached
        super().detach()
        if attached:
            self.memory.free()
