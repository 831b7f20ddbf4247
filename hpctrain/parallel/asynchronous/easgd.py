"""Synchronous EASGD: a replica on every rank, and elastic averaging of all workers with a centre at the same time.

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
from hpctrain.comm.transport.base import Work
from hpctrain.parallel.asynchronous import replica
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.replica import Replica
from hpctrain.parallel.clip import clip_whole_gradients


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
        replica.pull_worker(self._flat.values, self._centre.to(self._flat.values.device), alpha)
        replica.pull_centre(self._centre, self._mean, self.comm.size, alpha)

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
        with self._exchanging:
            self.comm.all_reduce(self._finite, "max")
        return norm if not float(self._finite[0]) else torch.full_like(norm, float("nan"))

    def centre(self) -> Tensor:
        """Return the centre; for local SGD, the current average of the workers."""
        return self._average() if self.settings.average else self._centre

    def set_centre(self, values: Tensor) -> None:
        """Set the centre to these values."""
        self._centre.copy_(values)
        self._work = None
