"""Bounded staleness: limit on the updates of other workers between a worker's read of the parameters and its update.

Note: why no worker waits forever. Let u be the number of updates made. For each worker j that has
read and not updated yet, let v_j be the value of u when it read. The sum of worker j is u - v_j,
plus one for each other such worker that read no later. Worker j is at its bound if its sum equals
the bound s.

No sum ever exceeds s. A worker that reads now finds at most p - 1 others, and s is at least p - 1.
The worker that read first may always update: in every other sum, one update is added and one worker
is removed. Any other worker may update only if all sums stay within s. The first worker is
therefore never blocked, and the others follow.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.comm.rma.remote_memory import WORDS as LOCK_WORDS
from hpctrain.comm.rma.remote_memory import Lock, RemoteMemory
from hpctrain.comm.transport.waiting import SPINS, timeout_seconds, until, waiting
from hpctrain.errors import SettingsError


def may_update(updates: int, read: Mapping[int, int], worker: int, bound: int) -> bool:
    """Return whether a worker may update now; ``read`` maps each worker with a pending update to its version."""
    others = {other: version for other, version in read.items() if other != worker}
    return all(
        updates + 1 - version + sum(1 for rank, own in others.items() if rank != other and own <= version) <= bound
        for other, version in others.items()
    )


def check_bound(bound: int, workers: int) -> None:
    """Raise ``SettingsError`` for a bound at which even workers that take turns would wait for each other."""
    if bound and bound < workers - 1:
        raise SettingsError(
            f"setting asynchronous.max_staleness = {bound}: with {workers} workers that take turns it is {workers - 1} "
            "already; allowed are that and more, or 0 for no bound",
            everywhere=True,
        )


class Bound:
    """Counters of all workers' updates, which admit each worker's update within the bound; rank 0 stores them.

    Note: without a bound no lock is taken, so a worker that stops inside these methods blocks no
    other worker. The counters alone give the staleness of an update.
    """

    def __init__(self, exposed: RemoteMemory, first: int, workers: int, bound: int) -> None:
        self._exposed, self._first, self._workers, self._limit = exposed, first, workers, bound
        self._lock = Lock(exposed, first)
        self._rank = exposed.rank
        self._version: int | None = None  # that this worker has read
        self._staleness = 0

    @staticmethod
    def words(workers: int) -> int:
        """Return the number of counters needed."""
        return LOCK_WORDS + 1 + workers

    def read(self) -> None:
        """Record that this worker reads the parameters now."""
        if not self._limit:
            self._version = self._updates()
            return
        with self._lock.of(0):
            self._version = self._updates()
            self._set(self._rank, self._version + 1)

    def admit(self) -> None:
        """Wait until this worker may update; with a bound, its update counts from here on."""
        if not self._limit:
            return
        operation = "other workers, at the staleness bound"
        with waiting(operation):
            until(self._try_admit, operation, lambda: self._timeout_message(operation), SPINS, period=1)

    def count(self) -> int:
        """Count this worker's update; return the number of updates by others since it read.

        The result is 0 if the worker has not read.
        """
        if not self._limit:
            self._record(self._add(LOCK_WORDS, 1))
        return self._staleness

    def cancel(self) -> None:
        """Record that this worker makes no update from what it read."""
        self._version = None
        if not self._limit:
            return
        with self._lock.of(0):
            self._set(self._rank, 0)

    def _try_admit(self) -> bool:
        self._exposed.progress()
        with self._lock.of(0):
            updates, read = self._updates(), self._pending_reads()
            if not may_update(updates, read, self._rank, self._limit):
                return False
            self._add(LOCK_WORDS, 1)
            self._set(self._rank, 0)
        self._record(updates)
        return True

    def _record(self, updates: int) -> None:
        self._staleness = 0 if self._version is None else updates - self._version
        self._version = None

    def _pending_reads(self) -> dict[int, int]:
        words = {worker: self._add(LOCK_WORDS + 1 + worker, 0) for worker in range(self._workers)}
        return {worker: word - 1 for worker, word in words.items() if word}

    def _updates(self) -> int:
        return self._add(LOCK_WORDS, 0)

    def _set(self, worker: int, value: int) -> None:
        index = LOCK_WORDS + 1 + worker
        self._add(index, value - self._add(index, 0))

    def _add(self, index: int, amount: int) -> int:
        return self._exposed.fetch_add(0, self._first + index, amount)

    def _timeout_message(self, operation: str) -> str:
        read = self._pending_reads()
        oldest = min(read, key=lambda worker: read[worker])
        return (
            f"{operation} ({self._limit} updates): rank {oldest} has read and made no update within "
            f"{timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"
        )
