"""Staleness of updates: its limit and histogram, and the fraction of time that workers spend on exchanges.

The staleness of an update is the number of updates of other workers between a worker's read of the
parameters and its update.

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

import time
from collections import Counter
from collections.abc import Mapping

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.rma.remote_memory import WORDS as LOCK_WORDS
from hpctrain.comm.rma.remote_memory import Lock, RemoteMemory
from hpctrain.comm.transport.waiting import SPINS, timeout_seconds, until, waiting
from hpctrain.errors import SettingsError
from hpctrain.parallel.strategy import Metrics


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

    def __init__(self, memory: RemoteMemory, workers: int, bound: int) -> None:
        self._memory, self._workers, self._limit = memory, workers, bound
        self._lock, self._rank = Lock(memory), memory.rank
        self._version: int | None = None  # that this worker has read
        self._staleness = 0

    @staticmethod
    def words(workers: int) -> int:
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
        self._memory.progress()
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
        return self._memory.fetch_add(0, index, amount)

    def _timeout_message(self, operation: str) -> str:
        read = self._pending_reads()
        oldest = min(read, key=lambda worker: read[worker])
        return (
            f"{operation} ({self._limit} updates): rank {oldest} has read and made no update within "
            f"{timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"
        )


MAX_BARS = 100  # maximum number of bars; the last one counts all updates of at least its staleness


class StalenessHistogram:
    """Staleness of this worker's updates since the last query: ``counts`` has the number of updates per staleness."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def record(self, staleness: int) -> None:
        self.counts[staleness] += 1

    def metrics(self, comm: Communicator) -> Metrics:
        """Return mean, maximum and histogram of all workers' updates, and reset them. Collective."""
        total: Counter[int] = Counter()
        for one in comm.all_gather_object(dict(self.counts)):
            total.update(one)
        self.counts.clear()
        updates = sum(total.values())
        mean = sum(staleness * count for staleness, count in total.items()) / max(updates, 1)
        return {
            "staleness": mean,
            "staleness_most": float(max(total, default=0)),
            "staleness_histogram": bars(total),
        }


def bars(counts: Counter[int], most: int = MAX_BARS) -> list[int]:
    """Return the numbers of updates with staleness 0, 1, 2, ... up to the maximum, in at most ``most`` bars."""
    found = [0] * min(max(counts, default=-1) + 1, most)
    for staleness, count in counts.items():
        found[min(staleness, most - 1)] += count
    return found


# Fraction of a worker's time that it spends on exchanges with other workers -------------------------------------------
#
#     with exchanging:
#         ...
#
# Note: which time is measured. It runs from the first pass of a step to the first pass of the next
# step, so it includes waits for samples. A synchronization of all workers pauses it until the next
# pass. Waits for the slowest worker in a synchronization, evaluations and checkpoint writes are therefore excluded.


class CommunicationTime:
    """Seconds of ``clock`` inside ``with`` blocks, which enclose every exchange, and total seconds of steps."""

    __slots__ = ("clock", "_entered", "_since", "_spent", "_elapsed")

    def __init__(self) -> None:
        self.clock = time.monotonic
        self._entered = 0.0
        self._since: float | None = None  # start of the current step; None outside a step
        self._spent = self._elapsed = 0.0

    def begin_step(self) -> None:
        """Record that the first pass of a step begins."""
        now = self.clock()
        if self._since is not None:
            self._elapsed += now - self._since
        self._since = now

    def pause(self) -> None:
        """Stop the measurement until the next step begins."""
        if self._since is not None:
            self._elapsed += self.clock() - self._since
        self._since = None

    def __enter__(self) -> None:
        self._entered = self.clock()

    def __exit__(self, *_: object) -> None:
        self._spent += self.clock() - self._entered

    def metrics(self, comm: Communicator, *, computes: bool = True) -> Metrics:
        """Return the fraction, from 0 to 1, as the mean of all workers, and reset it. Collective."""
        self.pause()
        own = self._spent / self._elapsed if computes and self._elapsed else None
        self._spent = self._elapsed = 0.0
        shares = [share for share in comm.all_gather_object(own) if share is not None]
        return {"communication": min(sum(shares) / len(shares), 1.0) if shares else 0.0}
