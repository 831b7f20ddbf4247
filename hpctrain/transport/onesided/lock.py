"""Mutual exclusion on a rank's remote memory.

Note: a ticket lock. A rank draws the next ticket and waits until that ticket is served, so ranks
get the lock in the order of their requests. The lock needs two counters of the owner, and no
message to a rank that computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.transport.activity import timeout_seconds, waiting
from hpctrain.transport.onesided.exposed import Exposed
from hpctrain.transport.patience import SPINS, until

WORDS = 3  # counters of the owner per lock
_NEXT, _SERVED, _HOLDER = range(WORDS)


class Lock:
    """One lock per rank's memory; ``first`` is the index of its first counter."""

    def __init__(self, exposed: Exposed, first: int = 0) -> None:
        self._exposed, self._first = exposed, first

    @contextmanager
    def of(self, rank: int) -> Iterator[int]:
        """Exclude all other ranks from a rank's memory for the ``with`` block.

        Yields the number of previous holders. Raises ``DeadlineError``, which names the current
        holder, if the lock is not acquired in time.
        """
        ticket = self._word(rank, _NEXT, 1)
        operation = f"the lock of rank {rank}'s memory"
        with waiting(operation):
            until(lambda: self._served(rank) >= ticket, operation, lambda: self._late(rank, operation), SPINS, period=1)
        holder = self._exposed.rank + 1
        self._word(rank, _HOLDER, holder)  # the previous holder reset it to 0
        try:
            yield ticket
        finally:
            self._word(rank, _HOLDER, -holder)
            self._word(rank, _SERVED, 1)

    def _served(self, rank: int) -> int:
        self._exposed.progress()
        return self._word(rank, _SERVED, 0)

    def _late(self, rank: int, operation: str) -> str:
        holder = self._word(rank, _HOLDER, 0) - 1
        who = f"held by rank {holder}" if holder >= 0 else "no current holder"
        return f"{operation}: timed out after {timeout_seconds():g} s (HPCTRAIN_TIMEOUT); {who}"

    def _word(self, rank: int, which: int, amount: int) -> int:
        return self._exposed.fetch_add(rank, self._first + which, amount)
