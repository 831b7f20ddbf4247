"""Let one rank at a time have what a rank exposes.

Note: a ticket lock. Who wants in draws the next number and waits until it is served, so that ranks come in the order
in which they asked. Two counters of the owner are all that it takes, and no message to anybody who computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.transport.activity import timeout_seconds, waiting
from hpctrain.transport.onesided.exposed import Exposed
from hpctrain.transport.patience import SPINS, until

WORDS = 3  # counters of the owner that a lock takes
_NEXT, _SERVED, _HOLDER = range(WORDS)


class Lock:
    """Be one lock for each rank's memory; ``first`` is the first of its counters."""

    def __init__(self, exposed: Exposed, first: int = 0) -> None:
        self._exposed, self._first = exposed, first

    @contextmanager
    def of(self, rank: int) -> Iterator[int]:
        """Exclude all others from a rank's memory for the ``with`` block.

        It yields how many had the lock before. Raises ``DeadlineError`` that names who holds it where its turn does not
        come.
        """
        ticket = self._word(rank, _NEXT, 1)
        operation = f"the lock of rank {rank}'s memory"
        with waiting(operation):
            until(lambda: self._served(rank) >= ticket, operation, lambda: self._late(rank, operation), SPINS, period=1)
        holder = self._exposed.rank + 1
        self._word(rank, _HOLDER, holder)  # from 0, as the one before left it
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
        who = f"rank {holder} holds it" if holder >= 0 else "nobody gave it on"
        return f"{operation}: {who}, and did not let go within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"

    def _word(self, rank: int, which: int, amount: int) -> int:
        return self._exposed.fetch_add(rank, self._first + which, amount)
