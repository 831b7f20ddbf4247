"""Metrics of asynchronous workers: histogram of staleness, and fraction of time spent on exchanges."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.strategy import Metrics

MAX_BARS = 100  # maximum number of bars; the last one counts all updates of at least its staleness


class StalenessHistogram:
    """Staleness of this worker's updates since the last query: ``counts`` has the number of updates per staleness."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def record(self, staleness: int) -> None:
        """Count an update."""
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


def bars(counts: Counter[int]) -> list[int]:
    """Return the numbers of updates with staleness 0, 1, 2, ... up to the maximum, in at most ``MAX_BARS`` bars."""
    found = [0] * min(max(counts, default=-1) + 1, MAX_BARS)
    for staleness, count in counts.items():
        found[min(staleness, MAX_BARS - 1)] += count
    return found


# Fraction of a worker's time that it spends on exchanges with other workers -------------------------------------------
#
#     with exchanging:
#         ...
#
# Note: which time is measured. It runs from the first pass of a step to the first pass of the next
# step, so it includes waits for samples. A synchronization of all workers pauses it until the next
# pass. Waits for the slowest worker in a synchronization, evaluations and checkpoint writes are therefore excluded.


_monotonic = time.monotonic


class CommunicationTime:
    """Seconds inside ``with`` blocks, which enclose every exchange, and total seconds of steps."""

    __slots__ = ("_entered", "_since", "_spent", "_elapsed")

    def __init__(self) -> None:
        self._entered = 0.0
        self._since: float | None = None  # start of the current step; None outside a step
        self._spent = self._elapsed = 0.0

    def begin_step(self) -> None:
        """Record that the first pass of a step begins."""
        now = _monotonic()
        if self._since is not None:
            self._elapsed += now - self._since
        self._since = now

    def pause(self) -> None:
        """Stop the measurement until the next step begins."""
        if self._since is not None:
            self._elapsed += _monotonic() - self._since
        self._since = None

    def __enter__(self) -> None:
        self._entered = _monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._spent += _monotonic() - self._entered

    def metrics(self, comm: Communicator, *, computes: bool = True) -> Metrics:
        """Return the fraction, from 0 to 1, as the mean of all workers, and reset it. Collective."""
        self.pause()
        own = self._spent / self._elapsed if computes and self._elapsed else None
        self._spent = self._elapsed = 0.0
        shares = [share for share in comm.all_gather_object(own) if share is not None]
        return {"communication": min(sum(shares) / len(shares), 1.0) if shares else 0.0}
