"""Let each worker exchange with the centre at its own pace, without the others: EASGD, asynchronous or by turns.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015, algorithm 1. The centre lies in
memory that all ranks expose, a piece with each, so no rank is spent on it. A worker that exchanges takes the lock of a
piece, reads it, adds its pull and lets go: no pull is lost, and the others wait for no more than a pass over a piece.

Note: turns. The first version of the method lets worker t mod p exchange in round t, and no other: a counter says whose
turn it is, and all wait for theirs. That is kept to be compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.server.figures.histogram import Histogram
from hpctrain.parallel.server.replica import Replica
from hpctrain.parallel.server.settings import ServerSettings
from hpctrain.parallel.strategy import Figures, clip_whole_gradients
from hpctrain.transport.activity import timeout_seconds, waiting
from hpctrain.transport.onesided.expose import expose
from hpctrain.transport.onesided.lock import WORDS, Lock
from hpctrain.transport.patience import SPINS, until

_TURN = WORDS  # the counter of rank 0 behind those of its lock


class ElasticAveragingApart(Replica):
    """Exchange with the centre whenever this worker is ready, or when it is its turn."""

    loose = True

    def __init__(self, model: nn.Module, comm: Communicator, settings: ServerSettings = ServerSettings()) -> None:
        super().__init__(model, comm, settings)
        total, size = self._flat.values.numel(), comm.size
        self._cuts = [slice(total * rank // size, total * (rank + 1) // size) for rank in range(size)]
        own = self._cuts[comm.rank]
        self._centre = expose(comm.transport, own.stop - own.start, self._flat.values.dtype, WORDS + 1)
        self._lock = Lock(self._centre)
        self._stale = Histogram()
        self._last = -1  # the number of this worker's last exchange, among all at its own piece
        # Each begins with its own piece: so they are not all at the same lock.
        self._order = [(comm.rank + step) % size for step in range(size)]
        self.move_centre(self._flat.host())

    def _carry_on(self) -> None:
        self._centre.progress()

    def _before_move(self) -> None:
        """Pull worker and centre, where this step has an exchange."""
        if not self._due:
            return
        if self.settings.mode == "round-robin":
            self._await_turn()
        alpha = self._alpha
        values = self._flat.host()
        for owner in self._order:
            self._exchange(owner, alpha, values[self._cuts[owner]])
        if values is not self._flat.values:  # a step copies once each way
            self._flat.values.copy_(values)
        if self.settings.mode == "round-robin":
            self._centre.fetch_add(0, _TURN, 1)

    def _exchange(self, owner: int, alpha: float, own: Tensor) -> None:
        with self._lock.of(owner) as number:
            centre = self._centre.view(owner)
            if centre is None:
                centre = torch.empty_like(own)
                self._centre.get(owner, centre)
            pull = (own - centre).mul_(alpha)
            self._centre.add(owner, pull)
        own.sub_(pull)
        if owner == self.comm.rank:  # all exchanges come to all pieces: what is counted here takes no message
            self._stale.note(number - self._last - 1)
            self._last = number

    def _await_turn(self) -> None:
        operation = "its turn to exchange with the centre"
        with waiting(operation):
            until(self._my_turn, operation, self._late, SPINS, period=1)

    def _my_turn(self) -> bool:
        self._centre.progress()
        return self._centre.fetch_add(0, _TURN) % self.comm.size == self.comm.rank

    def _late(self) -> str:
        turn = self._centre.fetch_add(0, _TURN) % self.comm.size
        waited = f"rank {self.comm.rank} waited {timeout_seconds():g} s (HPCTRAIN_TIMEOUT) for its turn"
        return f"{waited}: it is rank {turn}'s"

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale this worker's gradients so that their norm is at most ``max_norm``; return their norm before."""
        return clip_whole_gradients(self.model, max_norm)

    def centre(self) -> Tensor:
        """Return the centre; a call by all ranks."""
        self._centre.barrier()
        whole = torch.empty(self._flat.values.shape, dtype=self._flat.values.dtype)
        for owner, cut in enumerate(self._cuts):
            self._centre.get(owner, whole[cut])
        self._centre.barrier()  # nobody pulls at it before all have it
        return whole

    def figures(self) -> Figures:
        """Return the distance, the share, and how many exchanges of others came between two of a worker's own."""
        return {**super().figures(), **self._stale.figures(self.comm)}

    def settle(self) -> None:
        """Wait until all ranks have come here, and serve them meanwhile. Collective."""
        super().settle()
        self._centre.barrier()

    def move_centre(self, values: Tensor) -> None:
        """Put the centre where these values are; a call by all ranks."""
        self._centre.barrier()
        self._centre.put(self.comm.rank, values[self._cuts[self.comm.rank]])
        self._centre.barrier()

    def detach(self) -> None:
        """Take all hooks off the module, leave the centre in it, and give its memory back; a call by all ranks."""
        attached = self._hooks.attached
        super().detach()
        if attached:
            self._centre.free()
