"""Node-shared memory: every rank maps the buffers of all ranks of its node, and waits for their counters."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.transport.base import Recordable
from hpctrain.comm.transport.mpi import MpiTransport
from hpctrain.comm.transport.reserve import ORDERED, Window, reserve_window
from hpctrain.comm.transport.waiting import OVERSUBSCRIBED_SPINS, SPINS, SpinWait, limits, until
from hpctrain.errors import DeadlineError

# Node-shared memory: every rank maps the buffers of all ranks of its node ---------------------------------------------
#
# Note: synchronisation without messages. Each rank owns two counters in the shared control block,
# ``arrived`` and ``finished``. Only the owner writes them; all ranks read them. All ranks start the
# same operations in the same order, so a number identifies an operation. "Rank r has arrived at 7"
# means that its data of operation 7, and of all earlier ones, are in memory. "Finished 7" means that
# rank r has done its part of it.
#
# The counters are monotonic, so there is no race on a reset, and several operations can be in
# progress at once. A wait yields its core after a few hundred polls, because there may be more ranks
# than cores. It reads the clock occasionally, because a missing rank must not hang the job.


PAGE = 4096
SLAB = 2**20  # requests below this share a window, because MPI libraries have few windows
LINE = 16  # int64s: two cache lines per counter, because processors fetch lines in pairs
ARRIVED, FINISHED = 0, LINE  # places of a rank's counters


@dataclass(frozen=True)
class NodeBuffer:
    """One allocation: the bytes of every local rank, as uint8 tensors that all ranks map.

    In a ``common`` buffer these are the same bytes for all ranks.
    """

    ranks: list[Tensor]
    addresses: list[int]
    common: bool = False

    def views(self, offset: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the same segment of every rank's buffer, at ``offset`` bytes."""
        nbytes = numel * dtype.itemsize
        return [part[offset : offset + nbytes].view(dtype) for part in self.ranks]


class NodeMemory(Recordable):
    """Memory that the ranks of one node share, and the counters by which they synchronise."""

    def __init__(
        self,
        transport: MpiTransport,
        *,
        oversubscribed: bool = False,
        everyone: MpiTransport | None = None,
        ordered: bool = platform.machine() in ORDERED,
    ) -> None:
        """Create the counters. Collective.

        The ranks of ``everyone`` get memory together, or all of them raise ``NoSpaceError``.
        ``ordered`` tells whether the processor makes stores visible to other cores in program order,
        as x86-64 does; other processors need a fence.
        """
        self.spins = OVERSUBSCRIBED_SPINS if oversubscribed else SPINS
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport
        self._everyone = (everyone or transport).comm
        self._windows: list[Window] = []
        self._buffers: list[NodeBuffer] = []
        self._slab: NodeBuffer | None = None
        self._slab_used = 0
        self._fence: Callable[[], None] | None = None
        control = self._map(2 * LINE * 8)
        if not ordered:
            (first,) = self._windows
            assert isinstance(first, MPI.Win), "only windows of MPI have fences"
            first.Lock_all(MPI.MODE_NOCHECK)  # a window may be synchronised inside an epoch only
            self._fence = first.Sync
        counters = [memoryview(part.numpy().data).cast("q") for part in control.ranks]
        for counter in counters:
            counter[ARRIVED] = counter[FINISHED] = 0
        transport.barrier()
        self._counters = counters
        self._started = 0

    # Memory -----------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> tuple[NodeBuffer, int]:
        """Return a buffer and the offset of ``nbytes`` zeroed bytes per rank in it. Collective.

        All ranks pass the same size. The memory remains valid until ``free``: ranks drop tensors at
        different times, and unmapping is collective.
        """
        rounded = -(-nbytes // 64) * 64
        if rounded >= SLAB:
            return self._map(rounded), 0
        if self._slab is None or self._slab_used + rounded > SLAB:
            self._slab, self._slab_used = self._map(SLAB), 0
        offset, self._slab_used = self._slab_used, self._slab_used + rounded
        return self._slab, offset

    def allocate_common(self, nbytes: int) -> NodeBuffer:
        """Return ``nbytes`` zeroed bytes that all ranks share; all ranks pass the same size. Collective."""
        return self._map(nbytes, common=True)

    def find(self, tensor: Tensor) -> tuple[NodeBuffer, int] | None:
        """Return the buffer that contains a tensor and its offset in bytes; None for private memory."""
        address = tensor.data_ptr()
        for buffer in self._buffers:
            offset = address - buffer.addresses[self.rank]
            if 0 <= offset < buffer.ranks[self.rank].numel():
                return buffer, offset
        return None

    def name_of(self, tensor: Tensor) -> str:
        """Return the location of a tensor in this memory as text, the same on all ranks; empty for other tensors."""
        found = self.find(tensor)
        if found is None:
            return ""
        number = next(number for number, other in enumerate(self._buffers) if other is found[0])
        return f"node memory {number} at byte {found[1]}"

    def free(self) -> None:
        """Unmap all memory; its tensors must not be used afterwards. Collective."""
        self._buffers.clear()
        self._slab = None
        for counter in self._counters:
            counter.release()
        if self._fence is not None and isinstance(self._windows[0], MPI.Win):
            self._windows[0].Unlock_all()
        for window in self._windows:
            window.Free()
        self._windows.clear()
        self._transport.free()

    def _map(self, nbytes: int, *, common: bool = False) -> NodeBuffer:
        # Whole pages, so that each page has one owner, which touches it first and gets it on its
        # own NUMA node. Pages of common memory are shared out.
        paged = -(-nbytes // PAGE) * PAGE
        agree: Callable[[bool], bool] = lambda here: self._everyone.allreduce(here, MPI.LAND)
        window = reserve_window(self._transport.comm, 0 if common and self.rank else paged, agree)
        self._windows.append(window)
        places = [0 if common else rank for rank in range(self.size)]
        ranks = [torch.frombuffer(window.Shared_query(place)[0], dtype=torch.uint8, count=paged) for place in places]
        share, first = (-(-paged // PAGE // self.size) * PAGE, self.rank) if common else (paged, 0)
        ranks[self.rank][first * share : (first + 1) * share].zero_()
        buffer = NodeBuffer(ranks, [part.data_ptr() for part in ranks], common)
        if len(self._windows) > 1:  # the first one holds the counters
            self._buffers.append(buffer)
        self._transport.barrier()
        return buffer

    # Synchronisation --------------------------------------------------------------------------------------------------

    def arrive(self) -> int:
        """Announce that this rank's data of the next operation are in memory; return the operation's number."""
        self._started += 1
        if self._fence is not None:
            self._fence()
        self._counters[self.rank][ARRIVED] = self._started
        return self._started

    def finish(self, number: int) -> None:
        """Announce that this rank has done its part of an operation, and of all earlier ones."""
        if self._fence is not None:
            self._fence()
        self._counters[self.rank][FINISHED] = number

    def fence(self) -> None:
        """Order memory accesses: publish earlier writes of this rank, or make those of others visible."""
        if self._fence is not None:
            self._fence()

    def reached(self, state: int, number: int) -> bool:
        """Return whether every rank has ``ARRIVED`` at an operation, or has ``FINISHED`` its part of it."""
        for counter in self._counters:
            if counter[state] < number:
                return False
        if self._fence is not None:
            self._fence()
        return True

    def await_all(self, state: int, number: int, operation: str) -> None:
        """Wait until every rank has ``ARRIVED`` or ``FINISHED``; ``DeadlineError`` names late ranks."""
        for counter in self._counters:
            if counter[state] < number:
                spin = SpinWait(self.spins)
                while counter[state] < number:
                    if spin.ends():
                        raise DeadlineError(self._timeout_message(operation, number))
        if self._fence is not None:
            self._fence()

    def wait(self, ready: Callable[[], bool], operation: str, number: int) -> None:
        """Poll until ``ready()``; at the deadline raise ``DeadlineError``, which names the late ranks."""
        until(ready, operation, lambda: self._timeout_message(operation, number), self.spins)

    def _timeout_message(self, operation: str, number: int) -> str:
        missing = [rank for rank, counter in enumerate(self._counters) if counter[ARRIVED] < number]
        unfinished = [rank for rank, counter in enumerate(self._counters) if counter[FINISHED] < number]
        who = f"local ranks {missing} have not arrived" if missing else f"local ranks {unfinished} have not finished"
        return limits.message(f"{operation} number {number}", who)
