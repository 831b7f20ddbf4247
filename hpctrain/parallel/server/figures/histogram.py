"""Count how stale updates were: how many of others came between what a worker had read and what it made of that."""

from __future__ import annotations

from collections import Counter

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.strategy import Figures

LONGEST = 100  # bars that are handed out: the last one counts all that is as stale or staler


class Histogram:
    """Hold the staleness of this worker's updates since anybody asked: ``counts`` has how many there were of each."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def note(self, staleness: int) -> None:
        """Count an update."""
        self.counts[staleness] += 1

    def figures(self, comm: Communicator) -> Figures:
        """Return mean, most and histogram of the updates of all workers, and begin anew; a call by all ranks."""
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
    """Return how many updates had the staleness 0, 1, 2, ... up to the most that there was, or to ``LONGEST`` bars."""
    found = [0] * min(max(counts, default=-1) + 1, LONGEST)
    for staleness, count in counts.items():
        found[min(staleness, LONGEST - 1)] += count
    return found
