"""Total order of operations across carriers (host, GPU), which prevents deadlocks between ranks.

Note: why carriers need one order. All ranks start the same operations in the same order. However,
an operation in progress may need its rank's host to progress (a window reduction, an exchange in
rounds), and the host may be blocked in a wait for another carrier. Example: operation 1 is in
progress on the host and operation 2 on the GPU. Rank 0 waits for operation 2 first, and thus does
not progress operation 1. Rank 1 waits for operation 1 first, and has not started operation 2. Each
rank waits for the other.

Therefore a change of carrier is a synchronisation point. Before an operation starts on one carrier,
all earlier operations of the other carrier are completed if they need the host, or enqueued on
their stream otherwise. Then every rank can complete the first pending operation without any later
one, and by induction all operations complete. Operations of the same carrier do not wait for each
other.

Communicators split from each other share the synchronisation point, because their ranks share a
host. Each numbers its own operations, because only its own ranks number them identically. A lock
extends these guarantees to operations that hooks start from other threads.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from hpctrain.comm.transport.base import Work

if TYPE_CHECKING:
    from hpctrain.comm.device.nccl_channel import NcclChannel

PRUNE = 64  # number of registered works beyond which finished ones are released


class _SharedOrder:
    """Operations in progress of all communicators of one process, and their current carrier."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.carrier = ""
        self.works: deque[Work] = deque()
        self.channels: list[NcclChannel] = []

    def change(self, carrier: str) -> None:
        """Synchronise before the first operation of another carrier: complete works and flush channels."""
        # Wait before removal: if a wait raises, the queue is unchanged.
        while self.works:
            self.works[0].wait()
            self.works.popleft()
        for channel in self.channels:
            channel.flush()
        self.carrier = carrier


class OperationQueue:
    """Sequence numbers of one communicator's operations, in program order.

    ``with queue("host", "all_reduce") as number:`` encloses the start of each operation.
    """

    def __init__(self, parent: OperationQueue | None = None) -> None:
        self._order: _SharedOrder = _SharedOrder() if parent is None else parent._order
        self.number = 0
        self.operation = ""

    def __call__(self, carrier: str, operation: str) -> OperationQueue:
        """Start an operation on a carrier: ``host``, ``mpi``, ``staged`` or ``nccl``; synchronise if it changes."""
        # MPI carries host operations, staging and device pointers alike, so these are one carrier
        # with one order.
        carrier = "nccl" if carrier == "nccl" else "host"
        order = self._order
        order.lock.acquire()
        try:
            if carrier != order.carrier:
                order.change(carrier)
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

    def register(self, work: Work) -> Work:
        """Register a host operation that remains in progress; return it."""
        works = self._order.works
        while len(works) >= PRUNE and works[0].done():
            works.popleft()
        works.append(work)
        return work

    def register_channel(self, channel: NcclChannel) -> None:
        """Register a channel whose deferred messages must be enqueued on its stream before the host waits elsewhere."""
        self._order.channels.append(channel)

    def unregister_channel(self, channel: NcclChannel) -> None:
        """Unregister a closed channel."""
        self._order.channels.remove(channel)
