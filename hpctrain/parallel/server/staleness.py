"""Bound how many updates of others may come between a worker's reading of the parameters and its own update.

Note: why nobody waits for ever. Let u be the updates made, v_j what u was when worker j read, for each of those that
have read and not updated yet. Worker j is at its bound when u - v_j, and one for each other worker that read no later,
make the bound s. That sum never exceeds s: a worker that reads now finds at most p - 1 others, and s is at least that;
the one that read first may always update, since for every other one update more comes, and one worker less to wait for;
and any other is let through only where all sums stay within s. So the first is never held up, and the rest follow.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.errors import SettingsError
from hpctrain.transport.activity import timeout_seconds, waiting
from hpctrain.transport.onesided.exposed import Exposed
from hpctrain.transport.onesided.lock import WORDS as LOCK_WORDS
from hpctrain.transport.onesided.lock import Lock
from hpctrain.transport.patience import SPINS, until


def may_update(updates: int, read: Mapping[int, int], worker: int, most: int) -> bool:
    """Tell whether a worker may update now, where ``read`` says what each worker under way has read."""
    others = {other: version for other, version in read.items() if other != worker}
    return all(
        updates + 1 - version + sum(1 for rank, own in others.items() if rank != other and own <= version) <= most
        for other, version in others.items()
    )


def check_bound(most: int, workers: int) -> None:
    """Raise ``SettingsError`` for a bound at which workers that take turns would already wait for each other."""
    if most and most < workers - 1:
        raise SettingsError(
            f"setting server.max_staleness = {most}: with {workers} workers that take turns it is {workers - 1} "
            "already; allowed are that and more, or 0 for no bound",
            everywhere=True,
        )


class Bound:
    """Count the updates of all workers, and let each through when its time has come; counters lie with rank 0.

    Note: without a bound no lock is taken. Counters alone tell how stale an update is, and a worker that is stopped in
    the middle of anything here holds nobody up.
    """

    def __init__(self, exposed: Exposed, first: int, workers: int, most: int) -> None:
        self._exposed, self._first, self._workers, self._most = exposed, first, workers, most
        self._lock = Lock(exposed, first)
        self._rank = exposed.rank
        self._version: int | None = None  # as this worker has read it
        self._stale = 0

    @staticmethod
    def words(workers: int) -> int:
        """Return how many counters it takes."""
        return LOCK_WORDS + 1 + workers

    def read(self) -> None:
        """Note that this worker reads the parameters now."""
        if not self._most:
            self._version = self._updates()
            return
        with self._lock.of(0):
            self._version = self._updates()
            self._set(self._rank, self._version + 1)

    def admit(self) -> None:
        """Wait until this worker may update; where there is a bound, its update counts from here on."""
        if not self._most:
            return
        operation = "the others, at the bound of staleness"
        with waiting(operation):
            until(self._let_through, operation, lambda: self._late(operation), SPINS, period=1)

    def count(self) -> int:
        """Count the update that this worker has made; return how many of others came since it read.

        One that has not read has missed nothing.
        """
        if not self._most:
            self._note(self._word(LOCK_WORDS, 1))
        return self._stale

    def leave(self) -> None:
        """Note that this worker makes no update of what it has read."""
        self._version = None
        if not self._most:
            return
        with self._lock.of(0):
            self._set(self._rank, 0)

    def _let_through(self) -> bool:
        self._exposed.progress()
        with self._lock.of(0):
            updates, read = self._updates(), self._under_way()
            if not may_update(updates, read, self._rank, self._most):
                return False
            self._word(LOCK_WORDS, 1)
            self._set(self._rank, 0)
        self._note(updates)
        return True

    def _note(self, updates: int) -> None:
        self._stale = 0 if self._version is None else updates - self._version
        self._version = None

    def _under_way(self) -> dict[int, int]:
        words = {worker: self._word(LOCK_WORDS + 1 + worker, 0) for worker in range(self._workers)}
        return {worker: word - 1 for worker, word in words.items() if word}

    def _updates(self) -> int:
        return self._word(LOCK_WORDS, 0)

    def _set(self, worker: int, value: int) -> None:
        which = LOCK_WORDS + 1 + worker
        self._word(which, value - self._word(which, 0))

    def _word(self, which: int, amount: int) -> int:
        return self._exposed.fetch_add(0, self._first + which, amount)

    def _late(self, operation: str) -> str:
        read = self._under_way()
        oldest = min(read, key=lambda worker: read[worker])
        return (
            f"{operation} ({self._most} updates): rank {oldest} has read and made no update within "
            f"{timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"
        )
