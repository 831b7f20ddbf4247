"""Transport that can give up: MPI's collectives are started and polled, so that a timeout or an abort ends the wait.

A wait that ends early leaves its request to MPI, which may still write into the memory of the
tensor: the caller keeps that memory (``calls.GroupCalls``).
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from functools import reduce
from typing import Any

from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.transport.base import TAGS, Work
from hpctrain.comm.transport.failures import all_complete
from hpctrain.comm.transport.meeting import Barrier, MpiMessenger
from hpctrain.comm.transport.mpi import MpiTransport
from hpctrain.comm.transport.waiting import LATE, limits, timeout_seconds, waiting
from hpctrain.errors import CommunicationError, DeadlineError

MEETING_SECONDS = 2.0  # for ranks that have all come, before a call that cannot be given up
SPINS = 300  # tests of a request before the core is yielded
# Then it is yielded, which takes a microsecond. ``time.sleep(0)`` takes 50 to 100; it comes later: with it from the
# start, the sleep of one rank made the other wait so long that it slept, too, and so on for many small calls. A rank
# that waits for long sleeps, so that the threads of other ranks get its core.
YIELD_SECONDS = 0.0005
EAGER_SECONDS = 0.02  # how long the sleeps between tests are as short as possible
POLL_SECONDS = 0.0001  # the later ones
LEAVE_TAG = TAGS - 3  # of the messages by which ranks that destroy a group meet
LEAVE_SECONDS = 5.0  # how long a rank that leaves waits for the others before it keeps the objects of MPI


class MessageSizeError(CommunicationError):
    """A message has another size than the tensor that receives it."""


class PollingTransport(MpiTransport):
    """MPI transport whose waits have deadlines."""

    def __init__(self, comm: MPI.Intracomm, *sizes: int) -> None:
        super().__init__(comm, *sizes)
        self.comm = _PollingComm(self.comm)

    def _part(self, comm: MPI.Comm) -> PollingTransport:
        assert isinstance(comm, MPI.Intracomm), "ranks of one world make no intercommunicator"
        part = PollingTransport(comm, self.message_bytes, self._shares_bytes)
        comm.Free()
        return part

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return _Send([self.comm.Isend(piece, peer, tag) for piece in self._bytes(tensor)], tensor, peer)

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return _Receive([self.comm.Irecv(piece, peer, tag) for piece in self._bytes(tensor)], tensor, peer)

    def irecv_any(self, tensor: Tensor, tag: int) -> AnyReceive:
        """Start to receive from the first rank that sends a message with this tag."""
        self._check(tensor, tag=tag)
        return AnyReceive(self, tensor, tag)

    def progress(self) -> None:
        """Let MPI advance the messages of this rank."""
        self.comm.Iprobe(MPI.ANY_SOURCE, self.tags)

    def leave(self, free: Callable[[], None]) -> None:
        """Free MPI's objects if all ranks come to that; leave them to MPI's clean-up otherwise.

        The ranks meet by messages: MPI would match a collective of it with whatever another rank calls instead.
        """
        meeting = Barrier(MpiMessenger(self.comm), range(self.size), LEAVE_TAG)
        deadline = time.monotonic() + LEAVE_SECONDS
        while not meeting.done():
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)
        free()


def poll(ready: Callable[[], bool], why: Callable[[], str] = lambda: LATE) -> None:
    """Call ``ready`` until it returns True; raise ``DeadlineError`` if the limit of this thread passes."""
    for _ in range(SPINS):
        if ready():
            return
    start = time.monotonic()
    while not ready():
        waited = time.monotonic() - start
        if limits.exist:
            limits.check(why())
        elif waited > timeout_seconds():
            raise DeadlineError(limits.message("an operation of MPI", why()))
        if waited < YIELD_SECONDS:
            os.sched_yield()
        else:
            time.sleep(0 if waited < EAGER_SECONDS else POLL_SECONDS)


class _Send:
    """Handle of one message, sent in pieces; it holds a reference to the tensor, so that its memory stays valid."""

    operation = "send"

    def __init__(self, requests: list[MPI.Request], tensor: Tensor, peer: int) -> None:
        self._requests, self._tensor, self._peer = requests, tensor, peer

    def done(self) -> bool:
        return all_complete(MPI.Request.Testall, self._requests)

    def wait(self) -> None:
        with waiting(self.operation):
            poll(self.done, self.why)

    def why(self) -> str:
        """Return what is missing."""
        return f"rank {self._peer} has not received the message"


class _Receive(_Send):
    """Handle of one message to receive. It fails if another number of bytes arrives."""

    operation = "recv"

    def __init__(self, requests: list[MPI.Request], tensor: Tensor, peer: int) -> None:
        super().__init__(requests, tensor, peer)
        self._statuses = [MPI.Status() for _ in requests]
        self._completed = False

    def done(self) -> bool:
        if not self._completed and self._tested():
            self._completed = True  # a second test would return empty statuses
            arrived = sum(status.Get_count(MPI.BYTE) for status in self._statuses)
            if arrived != self._tensor.nbytes:
                raise self._error(f"{arrived}")
        return self._completed

    def _tested(self) -> bool:
        try:
            return all_complete(MPI.Request.Testall, self._requests, self._statuses)
        except MPI.Exception as error:
            if error.Get_error_class() in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
                raise self._error("more") from error
            raise

    def _error(self, arrived: str) -> MessageSizeError:
        return MessageSizeError(
            f"a message of {arrived} bytes from rank {self._peer} does not fit a tensor of {self._tensor.nbytes} bytes"
        )

    def why(self) -> str:
        return f"no message from rank {self._peer}"


class AnyReceive:
    """Handle of a message from any rank; ``source`` is the rank, once the message has begun to arrive."""

    operation = "recv"

    def __init__(self, transport: PollingTransport, tensor: Tensor, tag: int) -> None:
        self._transport, self._tensor, self._tag = transport, tensor, tag
        self._receive: Work | None = None
        self.source = -1

    def done(self) -> bool:
        """Return whether the message has arrived."""
        if self._receive is None:
            status = MPI.Status()
            if not self._transport.comm.Iprobe(MPI.ANY_SOURCE, self._tag, status):
                return False
            self.source = status.Get_source()
            self._receive = self._transport.irecv(self._tensor, self.source, self._tag)
        return self._receive.done()

    def wait(self) -> None:
        """Wait until the message has arrived."""
        with waiting(self.operation):
            poll(self.done, lambda: "no message from any rank")


class _PollingComm(MPI.Intracomm):
    """Communicator of mpi4py whose blocking collectives are nonblocking ones that are polled.

    Calls that have no nonblocking form follow a meeting: once all ranks have come, they return soon.
    """

    def _meet(self) -> None:
        """Wait until all ranks have come, and know that of each other.

        A rank that comes late passes the first barrier alone: the others have sent its messages before they gave up. It
        fails in the second one, which no rank that has passed the first one gives up soon.
        """
        self.Barrier()
        with limits.extended(MEETING_SECONDS):
            self.Barrier()

    def _finish(self, request: MPI.Request) -> None:
        poll(request.Test)

    def Bcast(self, spec: Any, root: int) -> None:  # type: ignore[override]
        self._finish(self.Ibcast(spec, root))

    def Reduce(self, source: Any, target: Any, op: MPI.Op, root: int) -> None:  # type: ignore[override]
        self._finish(self.Ireduce(source, target, op, root))

    def Allreduce(self, source: Any, target: Any, op: MPI.Op) -> None:  # type: ignore[override]
        self._finish(self.Iallreduce(source, target, op))

    def Reduce_scatter_block(self, source: Any, target: Any, op: MPI.Op) -> None:  # type: ignore[override]
        self._finish(self.Ireduce_scatter_block(source, target, op))

    def Allgather(self, source: Any, target: Any) -> None:
        self._finish(self.Iallgather(source, target))

    def Barrier(self) -> None:
        self._finish(self.Ibarrier())

    def Split(self, color: int = 0, key: int = 0) -> MPI.Intracomm:
        self._meet()
        return MPI.Intracomm(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Intracomm:
        self._meet()
        return MPI.Intracomm(super().Split_type(split_type, key, info))

    def allreduce(self, item: Any, op: Any = MPI.SUM) -> Any:
        """Return the reduced object of all ranks.

        Not by MPI's own: a rank that comes late passes a barrier which an earlier one has given up.
        """
        return reduce(op, self.allgather(item))

    def allgather(self, item: Any) -> list[Any]:
        """Return the objects of all ranks: first their sizes, then the pickled objects."""
        data = pickle.dumps(item)
        sizes = memoryview(bytearray(8 * self.size)).cast("q")
        sizes[self.rank] = len(data)
        self.Allgather(MPI.IN_PLACE, [sizes, 1, MPI.INT64_T])
        whole = bytearray(sum(sizes))
        starts = [sum(sizes[:rank]) for rank in range(self.size)]
        self._finish(self.Iallgatherv([data, MPI.BYTE], [whole, list(sizes), starts, MPI.BYTE]))
        return [pickle.loads(whole[start : start + size]) for start, size in zip(starts, sizes)]

    def bcast(self, item: Any, root: int = 0) -> Any:
        """Return the root's object."""
        data = pickle.dumps(item) if self.rank == root else b""
        size = memoryview(bytearray(8)).cast("q")
        size[0] = len(data)
        self.Bcast([size, 1, MPI.INT64_T], root)
        whole = bytearray(data) if self.rank == root else bytearray(size[0])
        self.Bcast([whole, MPI.BYTE], root)
        return pickle.loads(whole)
