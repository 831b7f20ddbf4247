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

from hpctrain.checkpoint.format.integrity import Written
from hpctrain.checkpoint.format.writer import FileChunk, FileWriter, Target, WriteRequest

NICENESS = 15  # it gets a thirtieth of a core next to a rank that never idles, and all of an idle core
EXIT = "exit"  # request to exit: needed besides EOF if a process that the rank has forked keeps the pipe open
_CHECK_EVERY = 1.0  # seconds between checks whether the rank is alive


def main(parent: int, memory: int, request_end: int, answer_end: int) -> None:
    """Serve one rank, the process ``parent``, until it closes the pipe; the other arguments are file descriptors."""
    handler = WriterProcess(parent, memory)
    os.nice(NICENESS)
    requests, answers = Connection(request_end, writable=False), Connection(answer_end, readable=False)
    while True:
        while not requests.poll(_CHECK_EVERY):
            handler.check_parent()
        try:
            name, arguments = requests.recv()
        except EOFError:
            return
        if name == EXIT:
            return
        answers.send(handler.handle(name, arguments))


class WriterProcess:
    """Request handler of the writer process; it writes from the memory that it shares with the rank."""

    def __init__(self, parent: int, memory: int) -> None:
        self._file, self._parent, self._descriptor = FileWriter(), parent, memory
        self._memory: mmap.mmap | None = None
        self._offsets: dict[str, int | None] | None = None

    def check_parent(self) -> None:
        """End this process if its rank has died: no process is left to decide about the file."""
        if os.getppid() != self._parent:
            os._exit(1)

    def handle(self, name: str, arguments: Sequence[Any]) -> tuple[str | None, Any]:
        """Return ``(None, result)``, or the name of an error and its text."""
        try:
            return None, getattr(self, name)(*arguments)
        except Exception as error:
            return type(error).__name__, str(error)

    def lay_out(self, request: WriteRequest) -> dict[str, int | None]:
        """Return the offsets of the datasets."""
        self._offsets = None
        self._offsets = self._file.lay_out(request)
        return self._offsets

    def write(self, target: Target, rows: Sequence[tuple[int, int, int, str]]) -> Written:
        """Write ranges of the shared memory (offset in the file, offset in the memory, length, name)."""
        return self._file.write(target, self._chunks(rows))

    def write_as_laid_out(self, target: Target, copied: Sequence[tuple[str, int, int, int]]) -> Written | None:
        """Write ranges of the shared memory (dataset, offset in it, offset in memory, length) if a layout exists."""
        offsets = self._offsets
        if offsets is None:
            return None
        return self.write(target, [((offsets[name] or 0) + to, at, n, name) for name, to, at, n in copied])

    def finish(self, written: Written) -> None:
        """Complete and commit the file."""
        self.check_parent()
        self._file.finish(written)

    def _chunks(self, rows: Sequence[tuple[int, int, int, str]]) -> Iterator[FileChunk]:
        view = memoryview(self._map()) if rows else memoryview(b"")
        for offset, at, nbytes, name in rows:
            self.check_parent()
            yield FileChunk(offset, view[at : at + nbytes], name)

    def _map(self) -> mmap.mmap:
        size = os.fstat(self._descriptor).st_size
        if self._memory is None or len(self._memory) != size:
            self._memory = mmap.mmap(self._descriptor, size, prot=mmap.PROT_READ)
        return self._memory


if __name__ == "__main__":
    sys.exit("this is run by a training program, not by hand")
