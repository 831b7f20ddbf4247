"""Exit notices between ranks, on a separate communicator."""

from __future__ import annotations

import time

from mpi4py import MPI

from hpctrain.transport.onesided.served import serve

GRACE = 1.0  # seconds within which all ranks of a regular job reach its end


class Farewell:
    """Exit notifier with its own communicator.

    Construction is collective over ``comm``. It needs MPI with THREAD_MULTIPLE: notices are read
    from a second thread.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self._left: set[int] = set()
        self._told = False

    def leave(self) -> None:
        """Return when all ranks leave; if that takes longer than ``GRACE``, notify the others first.

        Meanwhile, serve ranks that still access memory of this rank.
        """
        together = self._comm.Ibarrier()
        deadline = time.monotonic() + GRACE
        while not together.Test():
            serve()
            if not self._told and time.monotonic() > deadline:
                self._tell()
            time.sleep(0.001)

    def who_left(self) -> list[int]:
        """Return the ranks whose exit notice has arrived, in order."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, 0, status):
            source = status.Get_source()
            self._comm.Recv([None, 0, MPI.BYTE], source, 0)
            self._left.add(source)
        return sorted(self._left)

    def _tell(self) -> None:
        self._told = True
        for rank in range(self._comm.Get_size()):
            if rank != self._comm.Get_rank():
                self._comm.Isend([None, 0, MPI.BYTE], rank, 0).Free()
