"""Counters, in node memory, of the large all_reduces that each rank of a group has called.

Note: thread of an asynchronous collective. If the ranks of a node and their threads use all of its
cores, the thread of the group and the one that computes share a core: nothing overlaps, and each
wait of a collective of many pieces costs a turn of the scheduler. Therefore a large all_reduce that
all ranks have called runs at once, in the thread of its caller, which waits a moment for the others.
In a trial on two cores, two ranks, the exchange of DDP took 31 ms so, and 38 to 45 ms in the group's thread;
with a wait of at most 5 ms, a third of the calls went to that thread, and it took 42 ms.

A rank that is later than that finds the operation in the queue of the group's thread, as always, so
that programs that do other things before they wait for an operation do not hang.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.transport.reserve import NoSpaceError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

LEAST_BYTES = 2**20  # of a large tensor
LONGEST_WAIT = 0.05  # seconds that a caller waits for the others; half as long after each wait in vain
STOPPED = -(2**62)  # a number that remains negative however many calls follow
LINE = 16  # int64s: two cache lines per counter, because processors fetch lines in pairs


def is_large(tensor: Tensor) -> bool:
    """Return whether an all_reduce of this tensor is counted."""
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.nbytes >= LEAST_BYTES


class CalledCollectives:
    """Numbers of large all_reduces that the ranks of a group have called; for groups on one node.

    ``create`` is collective; until then, and on several nodes, ``by_all`` returns False.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._number = 0  # calls of this rank
        self._counters: memoryview | None = None
        self._cores = 0
        self._longest_wait = LONGEST_WAIT
        self._possible = 1 < comm.size == comm.local_size and comm.shares_memory

    @property
    def missing(self) -> bool:
        """Return whether ``create`` is due; the same on all ranks in the same operation."""
        return self._possible and self._counters is None

    def create(self) -> None:
        """Create the counters, if /dev/shm has space for them. Collective."""
        try:
            counters = self._comm.common(self._comm.size * LINE, torch.int64, must_share=True)
        except NoSpaceError:  # raised on all ranks
            self._possible = False
            return
        cores = self._comm.all_gather_object(frozenset(os.sched_getaffinity(0)))
        self._cores = len(frozenset().union(*cores))
        self._counters = counters.numpy().data.cast("B").cast("q")

    def announce(self) -> int:
        """Tell the other ranks that this one has called the next large all_reduce; return its number."""
        self._number += 1
        self._publish(self._number)
        return self._number

    def stop_counting(self) -> None:
        """Let no operation run at once any more: a callback calls large all_reduces, in an order of its own."""
        self._number = STOPPED
        self._publish(self._number)

    def _publish(self, number: int) -> None:
        if self._counters is not None:
            self._counters[self._comm.rank * LINE] = number

    def by_all(self, number: int, wait: bool) -> bool:
        """Return whether all ranks have called an operation and cores are scarce; ``wait`` a moment for late ranks."""
        if self._counters is None or number < 0 or self._comm.local_size * torch.get_num_threads() < self._cores:
            return False
        deadline = time.monotonic() + self._longest_wait if wait else 0.0
        while (least := min(self._counters[::LINE])) < number:
            if least < 0 or time.monotonic() > deadline:
                self._longest_wait /= 2 if wait else 1
                return False
            os.sched_yield()
        self._longest_wait = LONGEST_WAIT
        return True

    def close(self) -> None:
        """Drop the counters, before their memory is freed."""
        self._counters = None
