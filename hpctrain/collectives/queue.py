"""Keep one order among operations that different carriers carry out, so that no two ranks wait crosswise.

Note: why carriers need one order. Every rank starts the same operations in the same order; yet an operation under way
may need its rank's host to go on (a window reduction, an exchange in rounds), and the host may sit in a wait for
another carrier. Say operation 1 is under way on the host and operation 2 on the GPU. Rank 0 waits for 2 first, and so
does nothing for 1; rank 1 waits for 1 first, and has not started 2: each waits for the other. So a change of carrier is
a point of order: before an operation starts by one carrier, all operations before it by another are ended, where they
need the host, or handed to their stream, where they do not. Then the first operation that has not ended is one that
every rank can end without any later one, and by induction all end. Between operations of one carrier nothing is waited
for. Communicators split from each other share the point of order, since their ranks share a host; each numbers its own
operations, since its ranks alone do so alike. A lock makes this hold for operations that hooks start from other
threads.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from hpctrain.transport.base import Work
from hpctrain.transport.nccl_channel import NcclChannel

PRUNE = 64  # works kept before those that have ended are let go


class _Order:
    """Hold what communicators of one process have under way, and by which carrier."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.carrier = ""
        self.works: deque[Work] = deque()
        self.channels: list[NcclChannel] = []

    def change(self, carrier: str) -> None:
        """Come to the point of order before the first operation of another carrier."""
        # Ended first, named later: an error leaves the queue where it was.
        while self.works:
            self.works[0].wait()
            self.works.popleft()
        for channel in self.channels:
            channel.flush()
        self.carrier = carrier


class OperationQueue:
    """Number the operations of one communicator in program order.

    ``with queue("host", "all_reduce") as number:`` stands around the start of each operation.
    """

    def __init__(self, parent: OperationQueue | None = None) -> None:
        self._order: _Order = _Order() if parent is None else parent._order
        self.number = 0
        self.operation = ""

    def __call__(self, carrier: str, operation: str) -> OperationQueue:
        """Come to the turn of an operation, whose carrier is ``host``, ``mpi``, ``staged`` or ``nccl``."""
        # What MPI carries on the host it also carries for staging and device pointers: one carrier, one order.
        place = "nccl" if carrier == "nccl" else "host"
        order = self._order
        order.lock.acquire()
        try:
            if place != order.carrier:
                order.change(place)
        except BaseException:
            order.lock.release()
            raise
        self.number += 1
        self.operation = operation
        return self

    def __enter__(self) -> int:
        return self.number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._order.lock.release()

    def hold(self, work: Work) -> Work:
        """Remember an operation of the host that is left under way; return it."""
        works = self._order.works
        while len(works) >= PRUNE and works[0].done():
            works.popleft()
        works.append(work)
        return work

    def adopt(self, channel: NcclChannel) -> None:
        """Hand the messages that this channel holds back to its stream before the host waits for anything else."""
        self._order.channels.append(channel)

    def forget(self, channel: NcclChannel) -> None:
        """Let go of a channel that is closed."""
        self._order.channels.remove(channel)
