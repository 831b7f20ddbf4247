"""Writer process: writes checkpoints while its rank continues to train.

It maps the rank's copy of the tensors from shared memory, receives requests through one pipe and
answers through another. It imports neither torch nor MPI, runs at low priority, leaves signals to
its rank, and ends if the rank dies.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from hpctrain.checkpoint.file_writer import FileWriter, Target, WriteRequest
from hpctrain.checkpoint.format.integrity import Written
from hpctrain.checkpoint.format.writer import Stretch

NICENESS = 15  # it gets a thirtieth of a core beside a rank that never idles, and all of an idle core
LEAVE = "leave"  # request to exit: needed besides EOF if a process that the rank has forked keeps the pipe open
_GLANCE = 1.0  # seconds between checks whether the rank is alive


def main(parent: int, memory: int, inbox: int, outbox: int) -> None:
    """Serve one rank, the process ``parent``, until it closes the pipe; the other arguments are file descriptors."""
    scribe = WriterProcess(parent, memory)
    os.nice(NICENESS)
    orders, answers = Connection(inbox, writable=False), Connection(outbox, readable=False)
    while True:
        while not orders.poll(_GLANCE):
            scribe.check_parent()
        try:
            name, arguments = orders.recv()
        except EOFError:
            return
        if name == LEAVE:
            return
        answers.send(scribe.do(name, arguments))


class WriterProcess:
    """Request handler of the writer process; it writes from the memory that it shares with the rank."""

    def __init__(self, parent: int, memory: int) -> None:
        self._desk, self._parent, self._handle = FileWriter(), parent, memory
        self._memory: mmap.mmap | None = None
        self._places: dict[str, int | None] | None = None

    def check_parent(self) -> None:
        """End this process if its rank has died: no process is left to decide about the file."""
        if os.getppid() != self._parent:
            os._exit(1)

    def do(self, name: str, arguments: Sequence[Any]) -> tuple[str | None, Any]:
        """Return ``(None, result)``, or the name of an error and its text."""
        try:
            return None, getattr(self, name)(*arguments)
        except Exception as error:
            return type(error).__name__, str(error)

    def lay_out(self, order: WriteRequest) -> dict[str, int | None]:
        """Return the offsets of the datasets."""
        self._places = None
        self._places = self._desk.lay_out(order)
        return self._places

    def write(self, place: Target, rows: Sequence[tuple[int, int, int, str]]) -> Written:
        """Write ranges of the shared memory (offset in the file, offset in the memory, length, name)."""
        return self._desk.write(place, self._stretches(rows))

    def write_as_laid_out(self, place: Target, copied: Sequence[tuple[str, int, int, int]]) -> Written | None:
        """Write ranges of the shared memory (dataset, offset in it, offset in memory, length) if a layout exists."""
        places = self._places
        if places is None:
            return None
        return self.write(place, [((places[name] or 0) + to, at, n, name) for name, to, at, n in copied])

    def finish(self, written: Written) -> None:
        """Complete the file and rename it to its target."""
        self.check_parent()
        self._desk.finish(written)

    def _stretches(self, rows: Sequence[tuple[int, int, int, str]]) -> Iterator[Stretch]:
        view = memoryview(self._map()) if rows else memoryview(b"")
        for offset, at, nbytes, name in rows:
            self.check_parent()
            yield Stretch(offset, view[at : at + nbytes], name)

    def _map(self) -> mmap.mmap:
        size = os.fstat(self._handle).st_size
        if self._memory is None or len(self._memory) != size:
            self._memory = mmap.mmap(self._handle, size, prot=mmap.PROT_READ)
        return self._memory


if __name__ == "__main__":
    sys.exit("this is run by a training program, not by hand")
