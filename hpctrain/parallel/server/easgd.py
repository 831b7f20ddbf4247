"""Train a replica on every rank, and let replicas and a centre pull at each other: EASGD, all workers at the same time.

After You, Buluc and Demmel, "Scaling Deep Learning on GPU and Knights Landing clusters", SC 2017: all parameters travel
as one message, their sum is taken by all ranks together, and it is under way while the passes compute.

Note: what runs beside what. The pull on a worker depends on its parameters before the step, not on its gradient. So a
step begins by writing the parameters into the window and starting their sum; hooks of the backward pass carry it on,
and just before the optimizer makes its move the sum is there, and worker and centre are pulled. Every rank holds the
centre and moves it by the same numbers, so it is the same everywhere, and no rank is spent on it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.server import rules
from hpctrain.parallel.server.replica import Replica
from hpctrain.parallel.server.settings import ServerSettings
from hpctrain.parallel.strategy import clip_whole_gradients
from hpctrain.transport.base import Work


class ElasticAveraging(Replica):
    """Exchange with the centre together with all other workers, or take their average every so many steps."""

    def __init__(self, model: nn.Module, comm: Communicator, settings: ServerSettings = ServerSettings()) -> None:
        super().__init__(model, comm, settings)
        self._centre = self._flat.host().clone()
        self._mean = comm.empty(self._centre.numel(), self._centre.dtype)
        self._finite = comm.empty(1, torch.float32)
        self._work: Work | None = None

    def _begin(self) -> None:
        """Start the mean of all workers' parameters, where this step has an exchange."""
        if self._due and not self.settings.average:
            self._mean.copy_(self._flat.values)
            work = self.comm.all_reduce(self._mean, "average", async_op=True)
            assert not isinstance(work, Tensor)
            self._work = work

    def _carry_on(self) -> None:
        if self._work is not None:
            self._work.done()

    def _before_move(self) -> None:
        """Pull worker and centre."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        alpha = self._alpha
        rules.pull_worker(self._flat.values, self._centre.to(self._flat.values.device), alpha)
        rules.pull_centre(self._centre, self._mean, self.comm.size, alpha)

    def _after_move(self) -> None:
        """Take the average of all workers where local SGD is due."""
        if self.settings.average and self._due:
            self._flat.values.copy_(self._average())
            self._centre.copy_(self._mean)

    def _end_exchange(self) -> None:
        """Wait for the mean that is under way, and drop it."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _average(self) -> Tensor:
        self._mean.copy_(self._flat.values)
        self.comm.all_reduce(self._mean, "average")
        return self._mean

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale this worker's gradients so that their norm is at most ``max_norm``; return their norm before, a scalar.

        Where any worker's is not finite, all of them return NaN.
        """
        norm = clip_whole_gradients(self.model, max_norm)
        self._finite[0] = float(not bool(torch.isfinite(norm)))
        with self._exchanging:
            self.comm.all_reduce(self._finite, "max")
        return norm if not float(self._finite[0]) else torch.full_like(norm, float("nan"))

    def centre(self) -> Tensor:
        """Return the centre; of local SGD the average of workers as they are now."""
        return self._average() if self.settings.average else self._centre

    def move_centre(self, values: Tensor) -> None:
        """Put the centre where these values are."""
        self._centre.copy_(values)
        self._work = None
