"""Writer process: writes checkpoints while its rank continues to train.

It maps the rank's copy of the tensors from shared memory, receives requests through one pipe and
answers through another. It imports neither torch nor MPI, runs at low priority, leaves signals to
its rank, and ends if the rank dies.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from hpctrain.checkpoint.format.direct import release
from hpctrain.checkpoint.format.finite import Allowed
from hpctrain.checkpoint.format.layout import Written
from hpctrain.checkpoint.format.plan import FileChunk, Offsets, Target
from hpctrain.checkpoint.format.writer import FileWriter, open_private
from hpctrain.errors import HpctrainError

NICENESS = 10  # it gets a tenth of a core next to a rank that never idles, and all of an idle core
EXIT = "exit"  # request to exit: needed besides EOF if a process that the rank has forked keeps the pipe open
_CHECK_EVERY = 1.0  # seconds between checks whether the rank is alive


class SnapshotRange(NamedTuple):
    """A byte range of a dataset in the shared memory: offset in the dataset, offset in the memory, length."""

    name: str
    to: int
    at: int
    nbytes: int


def main(parent: int, memory: int, request_end: int, answer_end: int) -> None:
    """Serve one rank, the process ``parent``, until it closes the pipe; the other arguments are file descriptors."""
    writer = WriterProcess(parent, memory)
    os.nice(NICENESS)
    requests, answers = Connection(request_end, writable=False), Connection(answer_end, readable=False)
    while True:
        while not requests.poll(_CHECK_EVERY):
            writer.check_parent()
        try:
            name, arguments = requests.recv()
        except EOFError:
            return
        if name == EXIT:
            return
        answers.send(writer.handle(name, arguments))


class WriterProcess(FileWriter):
    """File writer in a process of its own; it writes from the memory that it shares with the rank."""

    def __init__(self, parent: int, memory: int) -> None:
        super().__init__(private=True)
        self._parent, self._descriptor = parent, memory
        self._memory: mmap.mmap | None = None

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

    def write_ranges(
        self,
        target: Target,
        ranges: Sequence[SnapshotRange],
        offsets: Offsets | None,
        values: Mapping[str, tuple[Allowed, str]],
    ) -> Written:
        """Write ranges of the shared memory; see ``write``. Before it, check the tensors whose ``values`` are named.

        The check is here and not in the rank because it would be a sixth of the time for which the
        rank waits.
        """
        try:
            for name, _, at, nbytes in ranges:
                if name in values:
                    self.check_parent()
                    allowed, dtype = values[name]
                    allowed.check(name, dtype, memoryview(self._map())[at : at + nbytes])
            return self.write(target, partial(self._chunks, ranges), offsets)
        except HpctrainError:
            self._release(target, ranges, offsets)
            raise

    def _release(self, target: Target, ranges: Sequence[SnapshotRange], offsets: Offsets | None) -> None:
        """Free the space of a failed write at once.

        The file itself is removed when the ranks next agree on it. Until then a full disk would keep them
        from writing anything else, and could keep them from getting there.
        """
        offsets = self._offsets if offsets is None else offsets
        if offsets is not None:
            with suppress(OSError, HpctrainError), open_private(target) as handle:
                release(handle, (((offsets[name] or 0) + to, nbytes) for name, to, _, nbytes in ranges))

    def finish(self, written: Written, *, verify: bool = False) -> None:
        """Complete and commit the file."""
        self.check_parent()
        super().finish(written, verify=verify)

    def _chunks(self, ranges: Sequence[SnapshotRange], offsets: Offsets) -> Iterator[FileChunk]:
        view = memoryview(self._map()) if ranges else memoryview(b"")
        for name, to, at, nbytes in ranges:
            self.check_parent()
            yield FileChunk((offsets[name] or 0) + to, view[at : at + nbytes], name)

    def _map(self) -> mmap.mmap:
        size = os.fstat(self._descriptor).st_size
        if self._memory is None or len(self._memory) != size:
            self._memory = mmap.mmap(self._descriptor, size, prot=mmap.PROT_READ)
        return self._memory


if __name__ == "__main__":
    sys.exit("this is run by a training program, not by hand")
