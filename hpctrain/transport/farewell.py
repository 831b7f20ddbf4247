"""Let ranks say that they leave, and find out who has left, outside of all other traffic."""

from __future__ import annotations

import time

from mpi4py import MPI

from hpctrain.transport.onesided.served import serve

GRACE = 1.0  # seconds in which all ranks of a job that ends well have come to its end


class Farewell:
    """Hold a communicator of its own for notices.

    All ranks of ``comm`` make it together, with MPI at THREAD_MULTIPLE: notices are read from a second thread.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self._left: set[int] = set()
        self._told = False

    def leave(self) -> None:
        """Return when all ranks leave; if that takes long, tell the others first.

        Ranks that still need memory which this one exposes are served meanwhile.
        """
        together = self._comm.Ibarrier()
        deadline = time.monotonic() + GRACE
        while not together.Test():
            serve()
            if not self._told and time.monotonic() > deadline:
                self._tell()
            time.sleep(0.001)

    def who_left(self) -> list[int]:
        """Return the ranks that have said so, in order."""
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
