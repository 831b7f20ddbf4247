"""Carry one checkpoint from all ranks into one file, in moves that the ranks make together.

Rank 0 lays the file out; every rank writes its share; rank 0 completes the file and gives it its name. Between these,
the ranks tell each other how it went: an error on one of them is raised on all, and nothing of the file stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpctrain.checkpoint.together.desk import Order, Place
from hpctrain.checkpoint.together.worker import Share, Worker
from hpctrain.collectives.agreement import agreed

if TYPE_CHECKING:
    from hpctrain.collectives.communicator import Communicator

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """Hold what a rank brings to a checkpoint: its share, and on rank 0 the order for the whole."""

    share: Share
    order: Order | None


class Saving:
    """Be a checkpoint under way; made by all ranks together, which then all call ``advance`` until it is ``done``.

    ``advance`` waits for what this rank's worker is doing; while that is ``busy`` there is something better to do.
    """

    def __init__(self, comm: Communicator, worker: Worker, job: Job) -> None:
        self._comm, self._worker = comm, worker
        self._moves = iter((self._write, self._finish, self._end))
        self.done = False
        self._together(lambda: worker.take(job.share))
        if job.order is not None:
            worker.lay_out(job.order)
        self._place = job.order.place if job.order is not None else None

    @property
    def busy(self) -> bool:
        """Tell whether this rank's worker has not ended the present move."""
        return not self.done and self._worker.busy

    def advance(self) -> None:
        """Make the next move; a call by all ranks. Raises the same error on all of them where one has failed."""
        next(self._moves)()

    def _write(self) -> None:
        places = self._together(lambda: self._worker.result() if self._first else None)
        place, places = self._comm.broadcast_object((self._place, places))
        assert isinstance(place, Place)
        self._worker.write(place, places)

    def _finish(self) -> None:
        written = self._together(self._worker.result, alike=False)
        everything = np.concatenate(self._comm.all_gather_object(written))
        if self._first:
            self._worker.finish(everything)

    def _end(self) -> None:
        self._together(lambda: self._worker.result() if self._first else None)
        self.done = True

    @property
    def _first(self) -> bool:
        return self._comm.rank == 0

    def _together(self, action: Callable[[], T], *, alike: bool = True) -> T:
        """Do something that may fail; if it fails anywhere, drop the checkpoint and raise on all ranks."""
        try:
            return agreed(self._comm, action, alike=alike)
        except BaseException:
            self.done = True
            self._worker.give_up()
            raise
