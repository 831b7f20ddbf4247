"""Remote memory: operations on other ranks' memory without the owner's help, locks, and a world of one rank.

Note: progress. Within a node all operations use shared memory; the owner may compute, sleep, or
have ended. Over a network without hardware support (TCP), MPI libraries serve a request only while
the owner of the memory is inside some MPI call. With both MPI wheels, a read of 1 MB waited three
seconds while the owner computed for three seconds. Therefore owners call ``progress`` between
pieces of work, and so does every wait in this package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hpctrain.comm.transport.base import Recordable
from hpctrain.comm.transport.waiting import SPINS, timeout_seconds, until, waiting
from hpctrain.errors import CommunicationError, UsageError

# Operations on memory of this node: on elements, and on rows of a matrix.
OPERATIONS: Mapping[str, Callable[..., object]] = {
    "get": lambda memory, out: out.copy_(memory),
    "put": Tensor.copy_,
    "add": Tensor.add_,
    "get_rows": lambda memory, out, rows: torch.index_select(memory, 0, rows, out=out),
    "put_rows": lambda memory, values, rows: memory.index_copy_(0, rows, values),
    "add_rows": lambda memory, values, rows: memory.index_add_(0, rows, values),
}


class RemoteMemory(Recordable, ABC):
    """Remote memory: elements of one rank that all ranks of a transport may read and change.

    ``lengths`` are the numbers of elements of every rank. ``words`` is the number of counters that
    each rank has in addition; all are initially zero. Operations of one rank on the same element
    take effect in program order.
    """

    name: str  # name of the implementation
    rank: int
    dtype: torch.dtype
    lengths: Sequence[int]

    @abstractmethod
    def view(self, rank: int) -> Tensor | None:
        """Return a rank's memory for direct access if it is on this node; None otherwise."""

    def get(self, rank: int, out: Tensor, start: int = 0) -> None:
        """Read ``out.numel()`` elements of a rank from ``start`` on; concurrent writes may or may not be visible."""
        self._access("get", rank, out, start)

    def put(self, rank: int, values: Tensor, start: int = 0) -> None:
        """Write elements of a rank; they are visible when this returns."""
        self._access("put", rank, values, start)

    def add(self, rank: int, values: Tensor, start: int = 0) -> None:
        """Add to elements of a rank; the result is visible when this returns.

        Ranks of the owner's node add in shared memory, so concurrent additions by them to the same
        element may be lost. Use a ``Lock`` if no addition may be lost.
        """
        self._access("add", rank, values, start)

    def get_rows(self, rank: int, out: Tensor, rows: Tensor, start: int = 0) -> None:
        """Read distinct rows of a matrix that starts at element ``start`` of a rank and is as wide as ``out``."""
        self._access("get_rows", rank, out, start, rows)

    def put_rows(self, rank: int, values: Tensor, rows: Tensor, start: int = 0) -> None:
        """Write distinct rows of a matrix; they are visible when this returns."""
        self._access("put_rows", rank, values, start, rows)

    def add_rows(self, rank: int, values: Tensor, rows: Tensor, start: int = 0) -> None:
        """Add to distinct rows of a matrix, as ``add`` does; the result is visible when this returns."""
        self._access("add_rows", rank, values, start, rows)

    @abstractmethod
    def fetch_add(self, rank: int, word: int, amount: int = 0) -> int:
        """Atomically add to a counter of a rank, and return its previous value. An amount of 0 reads it."""

    @abstractmethod
    def _carry(self, what: str, rank: int, values: Tensor, start: int, rows: Tensor | None) -> None:
        """Do one of ``OPERATIONS`` on elements or rows of a rank on another node; return when it has completed."""

    def progress(self) -> None:
        """Serve pending requests of other ranks for this rank's memory."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks and serve them meanwhile; their earlier requests have completed afterwards. Collective."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory; views must not be used afterwards. Collective."""

    def _access(self, operation: str, rank: int, values: Tensor, start: int, rows: Tensor | None = None) -> None:
        """Check the arguments; operate on the memory if its owner is on this node, or let the request be carried."""
        height = 0 if rows is None else self._height(values, rows, rank)
        end = start + (values.numel() if rows is None else height * values.shape[1])
        self._check(rank, values, start, end)
        memory = self.view(rank)
        if memory is None:
            if rows is None or rows.numel():
                self._carry(operation, rank, values, start, rows)
        elif rows is None:
            OPERATIONS[operation](memory[start:end], values.view(-1))
        else:
            OPERATIONS[operation](memory[start:end].view(height, values.shape[1]), values, rows)

    def _height(self, values: Tensor, rows: Tensor, rank: int) -> int:
        """Return the number of rows up to the last requested one."""
        if values.dim() != 2 or rows.dtype is not torch.int64 or rows.shape != values.shape[:1]:
            raise UsageError(f"values of shape {tuple(values.shape)} and rows of {tuple(rows.shape)}: one is for each")
        first, last = (int(rows.min()), int(rows.max()) + 1) if rows.numel() else (0, 0)
        if first < 0:
            raise UsageError(f"row {first} of rank {rank}: rows count from 0")
        return last

    def _check(self, rank: int, values: Tensor, start: int, end: int) -> None:
        if not 0 <= rank < len(self.lengths) or not 0 <= start <= end <= self.lengths[rank]:
            raise UsageError(
                f"elements {start} to {end} of rank {rank}: there are {_length_or_ranks(self.lengths, rank)}"
            )
        if values.dtype is not self.dtype or not values.is_contiguous() or values.device.type != "cpu":
            raise UsageError(f"exposed memory holds {self.dtype}: give a contiguous tensor of it on the host")


def _length_or_ranks(lengths: Sequence[int], rank: int) -> str:
    return f"{lengths[rank]}" if 0 <= rank < len(lengths) else f"{len(lengths)} ranks"


# Mutual exclusion on a rank's remote memory ---------------------------------------------------------------------------
#
# Note: a ticket lock. A rank draws the next ticket and waits until that ticket is served, so ranks
# get the lock in the order of their requests. The lock needs two counters of the owner, and no
# message to a rank that computes.


WORDS = 3  # counters of the owner per lock
_NEXT, _SERVED, _HOLDER = range(WORDS)


class Lock:
    """One lock per rank's memory; ``first`` is the index of its first counter."""

    def __init__(self, remote: RemoteMemory, first: int = 0) -> None:
        self._remote, self._first = remote, first

    @contextmanager
    def of(self, rank: int) -> Iterator[int]:
        """Exclude all other ranks from a rank's memory for the ``with`` block.

        Yields the number of previous holders. Raises ``DeadlineError``, which names the current
        holder, if the lock is not acquired in time.
        """
        ticket = self._word(rank, _NEXT, 1)
        operation = f"the lock of rank {rank}'s memory"
        with waiting(operation):
            until(
                lambda: self._served(rank) >= ticket,
                operation,
                lambda: self._timeout_message(rank, operation),
                SPINS,
                period=1,
            )
        holder = self._remote.rank + 1
        self._word(rank, _HOLDER, holder)  # the previous holder reset it to 0
        try:
            yield ticket
        finally:
            self._word(rank, _HOLDER, -holder)
            self._word(rank, _SERVED, 1)

    def _served(self, rank: int) -> int:
        self._remote.progress()
        return self._word(rank, _SERVED, 0)

    def _timeout_message(self, rank: int, operation: str) -> str:
        holder = self._word(rank, _HOLDER, 0) - 1
        who = f"held by rank {holder}" if holder >= 0 else "no current holder"
        return f"{operation}: timed out after {timeout_seconds():g} s (HPCTRAIN_TIMEOUT); {who}"

    def _word(self, rank: int, which: int, amount: int) -> int:
        return self._remote.fetch_add(rank, self._first + which, amount)


# Remote memory of a world of one rank, which accesses its own memory --------------------------------------------------


class LocalMemory(RemoteMemory):
    """Remote memory of one rank, without MPI."""

    name = "alone"
    rank = 0

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, words: int) -> None:
        self.lengths, self.dtype = list(lengths), dtype
        self._memory = torch.zeros(lengths[0], dtype=dtype)
        self._words = [0] * words

    def view(self, rank: int) -> Tensor | None:
        return self._memory

    def fetch_add(self, rank: int, word: int, amount: int = 0) -> int:
        before = self._words[word]
        self._words[word] += amount
        return before

    def barrier(self) -> None:
        """Return immediately: there is no other rank."""

    def free(self) -> None:
        self._memory = torch.empty(0, dtype=self.dtype)

    def _carry(self, what: str, rank: int, values: Tensor, start: int, rows: Tensor | None) -> None:
        raise CommunicationError("a world of one rank has no other node")
