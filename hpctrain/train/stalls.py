"""Straggler detection for asynchronous ranks: finds ranks that make no steps while others do.

Synchronous ranks would notice such a rank because they wait for it. Asynchronous ranks do not wait,
so they must check.

A rank is a straggler if it is behind this rank and has made no step for a tenth of
``HPCTRAIN_TIMEOUT``, while this rank has made several. A rank that waits at a synchronization is
not behind. A rank that is only slower makes a step in that time. In a job that was suspended as a
whole, no rank has made a step. Observations from before a synchronization are discarded, because
all ranks took part in it. A rank checks only the ranks of its node, where a check is one read of
shared memory. Another node would need a message, which a stopped rank does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.log import logger
from hpctrain.transport.activity import timeout_seconds

PART = 0.1  # fraction of HPCTRAIN_TIMEOUT that a rank may take for a step
STEPS = 10  # steps that this rank must have made in that time
PAUSE = 1.0  # seconds between two checks


@dataclass(frozen=True)
class _Seen:
    """First observation of a rank at its current step: the step, the time, and this rank's step at that time."""

    step: int
    when: float
    own: int


class Stalls:
    """Periodic check of the ranks of a node; the lowest rank that is not a straggler itself logs the warning.

    ``step_of`` returns a rank's step. ``met`` returns the number of synchronizations of this rank.
    """

    def __init__(
        self,
        rank: int,
        node: Sequence[int],
        step_of: Callable[[int], int],
        met: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._others = rank, [other for other in node if other != rank]
        self._step_of, self._met, self._clock = step_of, met, clock
        self._limit = PART * timeout_seconds()
        self._pause = min(PAUSE, self._limit / 4)
        self._meetings, self._next = met(), 0.0
        self._seen: dict[int, _Seen] = {}
        self._said: dict[int, float] = {}  # stragglers, and when each was first seen at its step

    def look(self, step: int) -> None:
        """Check the other ranks; ``step`` is the step that this rank is about to make."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + self._pause
        if self._met() != self._meetings:
            self._meetings = self._met()
            self._seen.clear()
        still = [rank for rank in self._others if self._stands_still(rank, step, now)]
        if all(rank in still for rank in self._others if rank < self._rank):
            for rank in still:
                self._say(rank, now)

    def _stands_still(self, rank: int, step: int, now: float) -> bool:
        its = self._step_of(rank)
        seen = self._seen.get(rank)
        if seen is None or seen.step != its:
            self._seen[rank] = _Seen(its, now, step)
            self._take_back(rank, now)
            return False
        return its < step and now - seen.when >= self._limit and step - seen.own >= STEPS

    def _say(self, rank: int, now: float) -> None:
        if rank not in self._said:
            seen = self._seen[rank]
            self._said[rank] = seen.when
            seconds = now - seen.when
            logger.warning(
                "rank %d has made no step for %.1f s, other ranks continue: it is in step %d", rank, seconds, seen.step
            )

    def _take_back(self, rank: int, now: float) -> None:
        since = self._said.pop(rank, None)
        if since is not None:
            logger.warning("rank %d makes steps again, after %.1f s", rank, now - since)
