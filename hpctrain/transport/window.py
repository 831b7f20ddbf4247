"""Share memory among the ranks of a node: every rank maps every rank's buffer.

Note: how ranks meet without messages. Each rank owns two counters in the shared control block, ``arrived`` and
``finished``; only the owner writes them, everybody reads them. All ranks start the same operations in the same order,
so an operation is known by its number: "rank r has arrived at 7" means that its data of operation 7, and of all before,
lies in memory; "finished 7" means that rank r has done its share of it. The counters only grow, so no reset can race,
and several operations can be under way at once. A wait yields its core after a few hundred looks, because there may be
more ranks than cores, and looks at the clock now and then, because a rank that never comes must not hang the job.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.errors import DeadlineError
from hpctrain.transport import shm_space
from hpctrain.transport.activity import timeout_seconds
from hpctrain.transport.mpi import MpiTransport
from hpctrain.transport.patience import CROWDED_SPINS, SPINS, Patience, until
from hpctrain.transport.recorder import Recordable

PAGE = 4096
SLAB = 2**20  # requests below this share a window, since MPI libraries have few of them
LINE = 16  # int64s: two cache lines a counter, because processors fetch lines in pairs

# x86-64 shows stores to other cores in program order; elsewhere a fence must say so.
_ORDERED = platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True)
class NodeBuffer:
    """Hold one allocation: the bytes of every local rank, as tensors of uint8 that all ranks map.

    In a ``common`` buffer these are the same bytes for all ranks.
    """

    ranks: list[Tensor]
    addresses: list[int]
    common: bool = False

    def views(self, offset: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the same piece of every rank's buffer, ``offset`` in bytes."""
        nbytes = numel * dtype.itemsize
        return [part[offset : offset + nbytes].view(dtype) for part in self.ranks]


class NodeMemory(Recordable):
    """Hold the memory that the ranks of one node share, and the counters by which they meet."""

    def __init__(
        self, transport: MpiTransport, *, crowded: bool = False, everyone: MpiTransport | None = None
    ) -> None:
        """Make the counters; ``everyone`` are the ranks that get memory all together or raise ``NoSpaceError``."""
        self.spins = CROWDED_SPINS if crowded else SPINS
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport
        self._everyone = (everyone or transport).comm
        self._windows: list[MPI.Win] = []
        self._buffers: list[NodeBuffer] = []
        self._slab: NodeBuffer | None = None
        self._slab_used = 0
        self._fence: Callable[[], None] | None = None
        control = self._map(2 * LINE * 8)
        if not _ORDERED:
            self._windows[0].Lock_all(MPI.MODE_NOCHECK)  # a window may be synchronised inside an epoch only
            self._fence = self._windows[0].Sync
        counters = [memoryview(part.numpy().data).cast("q") for part in control.ranks]
        for counter in counters:
            counter[0] = counter[LINE] = 0
        transport.barrier()
        self._counters = counters
        self._started = 0

    # Memory -----------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> tuple[NodeBuffer, int]:
        """Return a buffer and the offset in it of ``nbytes`` zeroed bytes a rank; a call by all ranks with one size.

        The memory lives until ``free``: ranks drop tensors at different times, and only all together can unmap.
        """
        rounded = -(-nbytes // 64) * 64
        if rounded >= SLAB:
            return self._map(rounded), 0
        if self._slab is None or self._slab_used + rounded > SLAB:
            self._slab, self._slab_used = self._map(SLAB), 0
        offset, self._slab_used = self._slab_used, self._slab_used + rounded
        return self._slab, offset

    def allocate_common(self, nbytes: int) -> NodeBuffer:
        """Return ``nbytes`` zeroed bytes that are the same for all ranks; a call by all ranks with one size."""
        paged = -(-nbytes // PAGE) * PAGE
        part = _tensor(self._window(paged if self.rank == 0 else 0).Shared_query(0)[0], paged)
        # Each rank touches its share first, and so finds it on its own memory bank.
        share = -(-paged // PAGE // self.size) * PAGE
        part[self.rank * share : (self.rank + 1) * share].zero_()
        buffer = NodeBuffer([part] * self.size, [part.data_ptr()] * self.size, common=True)
        self._buffers.append(buffer)
        self._transport.barrier()
        return buffer

    def find(self, tensor: Tensor) -> tuple[NodeBuffer, int] | None:
        """Return the buffer that a tensor lies in and its offset there in bytes; None for memory of its own."""
        address = tensor.data_ptr()
        for buffer in self._buffers:
            offset = address - buffer.addresses[self.rank]
            if 0 <= offset < buffer.ranks[self.rank].numel():
                return buffer, offset
        return None

    def number_of(self, buffer: NodeBuffer) -> int:
        """Return the number of a buffer, the same on all ranks."""
        return next(number for number, other in enumerate(self._buffers) if other is buffer)

    def free(self) -> None:
        """Unmap everything; a call by all ranks, after which no tensor of this memory may be touched."""
        self._buffers.clear()
        self._slab = None
        for counter in self._counters:
            counter.release()
        if self._fence is not None:
            self._windows[0].Unlock_all()
        for window in self._windows:
            window.Free()
        self._windows.clear()
        self._transport.free()

    def _map(self, nbytes: int) -> NodeBuffer:
        # Whole pages, so that each page has one owner who touches it first and finds it on its own memory bank.
        paged = -(-nbytes // PAGE) * PAGE
        window = self._window(paged)
        ranks = [_tensor(window.Shared_query(rank)[0], paged) for rank in range(self.size)]
        ranks[self.rank].zero_()
        buffer = NodeBuffer(ranks, [part.data_ptr() for part in ranks])
        if len(self._windows) > 1:
            self._buffers.append(buffer)
        self._transport.barrier()
        return buffer

    def _window(self, nbytes: int) -> MPI.Win:
        made = shm_space.window(self._transport.comm, nbytes, lambda here: self._everyone.allreduce(here, MPI.LAND))
        self._windows.append(made)
        return made

    # Meeting ----------------------------------------------------------------------------------------------------------

    def arrive(self) -> int:
        """Say that this rank's data of the next operation lies in memory; return the operation's number."""
        self._started += 1
        if self._fence is not None:
            self._fence()
        self._counters[self.rank][0] = self._started
        return self._started

    def finish(self, number: int) -> None:
        """Say that this rank has done its share of an operation, and of all before it."""
        if self._fence is not None:
            self._fence()
        self._counters[self.rank][LINE] = number

    def fence(self) -> None:
        """Show other ranks what this one has written before, in order, or see so what others have written."""
        if self._fence is not None:
            self._fence()

    def all_arrived(self, number: int) -> bool:
        """Tell whether every rank's data of an operation lies in memory."""
        return self._reached(number, 0)

    def all_finished(self, number: int) -> bool:
        """Tell whether every rank has done its share of an operation."""
        return self._reached(number, LINE)

    def await_arrived(self, number: int, operation: str) -> None:
        """Wait until every rank's data of an operation lies in memory; ``DeadlineError`` names late ranks."""
        self._await(0, number, operation)

    def await_finished(self, number: int, operation: str) -> None:
        """Wait until every rank has done its share of an operation; ``DeadlineError`` names late ranks."""
        self._await(LINE, number, operation)

    def wait(self, ready: Callable[[], bool], operation: str, number: int) -> None:
        """Look until ``ready()``; raise ``DeadlineError`` naming the late ranks at the deadline."""
        until(ready, operation, lambda: self._late(operation, number), self.spins)

    def _await(self, which: int, number: int, operation: str) -> None:
        for counter in self._counters:
            if counter[which] < number:
                patience = Patience(self.spins)
                while counter[which] < number:
                    if patience.ends():
                        raise DeadlineError(self._late(operation, number))
        if self._fence is not None:
            self._fence()

    def _reached(self, number: int, which: int) -> bool:
        for counter in self._counters:
            if counter[which] < number:
                return False
        if self._fence is not None:
            self._fence()
        return True

    def _late(self, operation: str, number: int) -> str:
        late = [rank for rank, counter in enumerate(self._counters) if counter[0] < number]
        slow = [rank for rank, counter in enumerate(self._counters) if counter[LINE] < number]
        who = f"local ranks {late} have not come" if late else f"local ranks {slow} have not finished"
        return f"{operation} number {number}: {who} within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"


def _tensor(memory: MPI.buffer, nbytes: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
