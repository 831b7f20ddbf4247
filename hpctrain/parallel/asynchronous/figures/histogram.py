"""Histogram of staleness: the number of updates by others between a worker's read and its update."""

from __future__ import annotations

from collections import Counter

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.strategy import Figures

LONGEST = 100  # maximum number of bars; the last one counts all updates of at least its staleness


class Histogram:
    """Staleness of this worker's updates since the last query: ``counts`` has the number of updates per staleness."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def note(self, staleness: int) -> None:
        """Count an update."""
        self.counts[staleness] += 1

    def figures(self, comm: Communicator) -> Figures:
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
    """Return the numbers of updates with staleness 0, 1, 2, ... up to the maximum, in at most ``LONGEST`` bars."""
    found = [0] * min(max(counts, default=-1) + 1, LONGEST)
    for staleness, count in counts.items():
        found[min(staleness, LONGEST - 1)] += count
    return found
