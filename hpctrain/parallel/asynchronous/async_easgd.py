"""Asynchronous EASGD: each worker exchanges with the centre at its own pace, or by turns (round-robin).

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, algorithm 1.
The centre is in memory that all ranks expose, one part per rank, so no rank is dedicated to it. For
an exchange, a worker locks a part, reads it, adds its pull and unlocks. No pull is lost, and other
workers wait at most for the processing of one part.

Note: turns. In the first version of the method, only worker t mod p exchanges in round t. A counter
holds the current turn, and every worker waits for its own. This mode is kept for comparison.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.rma.remote_memory import WORDS, Lock
from hpctrain.comm.rma.select import expose
from hpctrain.comm.transport.waiting import SPINS, timeout_seconds, until, waiting
from hpctrain.parallel.asynchronous.config import AsynchronousSettings
from hpctrain.parallel.asynchronous.metrics import StalenessHistogram
from hpctrain.parallel.asynchronous.replica import Replica
from hpctrain.parallel.strategy import Metrics

_TURN_WORD = WORDS  # the counter of rank 0 after those of its lock


class AsyncElasticAveraging(Replica):
    """EASGD strategy in which a worker exchanges with the centre when it is ready, or when it has its turn."""

    asynchronous = True

    def __init__(
        self, model: nn.Module, comm: Communicator, settings: AsynchronousSettings = AsynchronousSettings()
    ) -> None:
        super().__init__(model, comm, settings)
        total, size = self._flat.values.numel(), comm.size
        self._slices = [slice(total * rank // size, total * (rank + 1) // size) for rank in range(size)]
        own = self._slices[comm.rank]
        self._centre = expose(comm.transport, own.stop - own.start, self._flat.values.dtype, WORDS + 1)
        self._lock = Lock(self._centre)
        self._staleness = StalenessHistogram()
        self._last_exchange = -1  # index of this worker's last exchange, among all exchanges of its own part
        # Each worker begins with its own part, so that they do not all contend for the same lock.
        self._order = [(comm.rank + step) % size for step in range(size)]
        self.set_centre(self._flat.host())

    def _progress(self) -> None:
        self._centre.progress()

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
            self._centre.fetch_add(0, _TURN_WORD, 1)

    def _exchange(self, owner: int, alpha: float, own: Tensor) -> None:
        with self._lock.of(owner) as number:
            centre = self._centre.view(owner)
            if centre is None:
                centre = torch.empty_like(own)
                self._centre.get(owner, centre)
            pull = (own - centre).mul_(alpha)
            self._centre.add(owner, pull)
        own.sub_(pull)
        if owner == self.comm.rank:  # every exchange includes every part, so counting at the own part needs no message
            self._staleness.record(number - self._last_exchange - 1)
            self._last_exchange = number

    def _wait_for_turn(self) -> None:
        operation = "its turn to exchange with the centre"
        with waiting(operation):
            until(self._has_turn, operation, self._timeout_message, SPINS, period=1)

    def _has_turn(self) -> bool:
        self._centre.progress()
        return self._centre.fetch_add(0, _TURN_WORD) % self.comm.size == self.comm.rank

    def _timeout_message(self) -> str:
        turn = self._centre.fetch_add(0, _TURN_WORD) % self.comm.size
        waited = f"rank {self.comm.rank} waited {timeout_seconds():g} s (HPCTRAIN_TIMEOUT) for its turn"
        return f"{waited}: it is rank {turn}'s"

    def centre(self) -> Tensor:
        """Return the centre. Collective."""
        self._centre.barrier()
        whole = torch.empty(self._flat.values.shape, dtype=self._flat.values.dtype)
        for owner, where in enumerate(self._slices):
            self._centre.get(owner, whole[where])
        self._centre.barrier()  # no rank changes the centre before all have read it
        return whole

    def metrics(self) -> Metrics:
        """Return the metrics of ``Replica``, and the number of others' exchanges between two own ones. Collective."""
        return {**super().metrics(), **self._staleness.metrics(self.comm)}

    def drain(self) -> None:
        """Wait for all ranks, and serve their accesses meanwhile. Collective."""
        super().drain()
        self._centre.barrier()

    def set_centre(self, values: Tensor) -> None:
        """Set the centre to these values. Collective."""
        self._centre.barrier()
        self._centre.put(self.comm.rank, values[self._slices[self.comm.rank]])
        self._centre.barrier()

    def detach(self) -> None:
        """Remove all hooks from the module, leave the centre in it, and free the centre's memory. Collective."""
        attached = self._hooks.attached
        super().detach()
        if attached:
            self._centre.free()
