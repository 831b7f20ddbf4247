"""Trace of selected steps of a run on every rank, written to a file after the last of these steps."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain import trace
from hpctrain.collectives.communicator import Communicator
from hpctrain.train import trace_file, trace_read


class Tracing:
    """Recorder of the steps ``first`` to ``last``, counted from this start of the run.

    Every rank calls ``begin_step`` and ``end_step`` around every step. ``close`` is collective and
    writes the recording of a run that ended early. ``abandon`` is local to a rank. ``place``
    describes the coordinates of this rank in the mesh. ``meet`` is called before the ranks write
    together.
    """

    def __init__(
        self,
        comm: Communicator,
        folder: Path,
        steps: Sequence[int] | None,
        place: str = "",
        meet: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._comm, self._path, self._place, self._meet = comm, folder / trace_read.NAME, place, meet
        self._first, self._last = steps or (0, 0)
        self._count = 0
        self._recording = False
        self._began: tuple[int, float] | None = None

    def begin_step(self, step: int) -> None:
        """Begin update number ``step``, counted over all resumes."""
        self._count += 1
        if self._count == self._first:
            trace.start()
            self._recording = True
        if self._recording:
            self._began = step, time.monotonic()

    def end_step(self) -> None:
        """End the step; after the last requested step, write the file."""
        if self._began is not None:
            step, began = self._began
            self._began = None
            trace.add("step", began, time.monotonic(), step=step)
        if self._count == self._last:
            self.close()

    def close(self) -> None:
        """Write the recording if it has not been written."""
        if self._recording:
            self._recording = False
            self._meet("the writing of the trace")
            trace_file.merge(self._comm, trace.take(), self._path, place=self._place, host=socket.gethostname())

    def abandon(self) -> None:
        """Discard the recording."""
        if self._recording:
            self._recording = False
            trace.take()
