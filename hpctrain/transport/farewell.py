"""Let ranks say that they leave, and find out who has left, outside of all other traffic."""

from __future__ import annotations

import time

from mpi4py import MPI

from hpctrain.transport.mpi import MpiTransport

GRACE = 1.0  # seconds in which all ranks of a job that ends well have come to its end


class Farewell:
    """Hold a communicator of its own for notices, and a page of node memory for claims.

    All ranks of the transport make it together, with MPI at THREAD_MULTIPLE: notices are read from a second thread.
    """

    def __init__(self, transport: MpiTransport) -> None:
        self._comm = transport.comm.Dup()
        self._node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self._comm.Get_rank())
        assert isinstance(self._node, MPI.Intracomm), "a part of a world is no intercommunicator"
        self._window = MPI.Win.Allocate_shared(8, 8, comm=self._node)
        claims = [self._window.Shared_query(rank)[0] for rank in range(self._node.Get_size())]
        self._claims = [claim.cast("q") for claim in claims]
        self._claims[self._node.Get_rank()][0] = 0
        self._node.Barrier()
        self._left: set[int] = set()
        self._told = False

    def claim(self, seconds: float) -> bool:
        """Tell whether this rank is the first of its node to claim the last word; takes ``seconds``."""
        me = self._node.Get_rank()
        stamp = time.monotonic_ns()  # one clock for all processes of a node
        self._claims[me][0] = stamp
        time.sleep(seconds)
        rivals = [(claim[0], rank) for rank, claim in enumerate(self._claims) if claim[0]]
        return min(rivals) == (stamp, me)

    def leave(self) -> None:
        """Return when all ranks leave; if that takes long, tell the others first."""
        together = self._comm.Ibarrier()
        deadline = time.monotonic() + GRACE
        while not together.Test():
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
