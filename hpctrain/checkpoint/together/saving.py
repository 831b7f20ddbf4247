"""Carry one checkpoint from all ranks into one file, in moves that the ranks make together.

Rank 0 lays the file out; every rank writes its share; rank 0 completes the file and gives it its name. Between these,
the ranks tell each other how it went: an error on one of them is raised on all, and nothing of the file stays.

Note: writing at once. Where a dataset lies follows from those before it and itself, so in a run each file has its
tensors where the one before had them. Then nobody waits for the layout: all ranks write while rank 0 makes it. It is
compared with what was expected; were it another, the share would be written again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hpctrain.checkpoint.together.desk import Order, Place, clear, create
from hpctrain.checkpoint.together.worker import Places, Share, Worker
from hpctrain.collectives.agreement import agreed

if TYPE_CHECKING:
    from hpctrain.collectives.communicator import Communicator

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """Hold what a rank brings to a checkpoint: its share, and on rank 0 the order for the whole.

    ``expected`` says where the datasets of the model and the optimizer are expected to lie, on all ranks or on none.
    """

    share: Share
    order: Order | None
    expected: Places | None = None


class Saving:
    """Be a checkpoint under way; made by all ranks together, which then all call ``advance`` until it is ``done``.

    ``advance`` waits for what this rank's worker is doing; while that is ``busy`` there is something better to do.
    ``places`` are those of the datasets, once they are known.
    """

    def __init__(self, comm: Communicator, worker: Worker, job: Job) -> None:
        self._comm, self._worker, self._job = comm, worker, job
        self.done = False
        self.places: Places | None = None
        self._moves: Iterator[Callable[[], None]] = iter((self._write, self._finish, self._end))
        self._together(lambda: worker.take(job.share))
        # The file is there before anybody looks for it.
        self._together(lambda: create(job.order) if job.order is not None else None)
        own = job.order.place if job.order is not None else None
        self._place: Place = comm.broadcast_object(own)
        if job.order is not None:
            worker.lay_out(job.order)
        if job.expected is not None:
            self._moves = iter((self._compare, self._end))
            if job.order is None:
                worker.write(self._place, job.expected)
            else:
                worker.write_as_laid_out(self._place)

    @property
    def busy(self) -> bool:
        """Tell whether this rank's worker has not ended the present move."""
        return not self.done and self._worker.busy

    def advance(self) -> None:
        """Make the next move; a call by all ranks. Raises the same error on all of them where one has failed."""
        next(self._moves)()

    def _write(self) -> None:
        places = self._together(lambda: self._worker.result() if self._first else None)
        self.places = self._comm.broadcast_object(places)
        assert self.places is not None
        self._worker.write(self._place, self.places)

    def _compare(self) -> None:
        """See whether the layout is what was expected, if not write again at the right places, and go on."""
        laid_out = self._together(lambda: self._worker.result() if self._first else None)
        expected = self._job.expected
        assert expected is not None
        moved = laid_out is not None and any(laid_out[name] != place for name, place in expected.items())
        self.places = self._comm.broadcast_object(laid_out if moved else None) or expected
        if self.places is not expected:
            self._together(self._worker.result, alike=False)
            self._together(lambda: clear(self._place) if self._first else None)
            self._worker.write(self._place, self.places)
        self._finish()

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
