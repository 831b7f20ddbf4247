"""Say of workers at their own pace which ones stand still while others go on: nobody waits for them, so nobody would.

Note: who is taken to stand still. Whoever is behind this rank, and has made no step for a tenth of ``HPCTRAIN_TIMEOUT``
in which this one made several: who waits at a meeting is not behind, who is only slower makes a step in that time, and
in a job that was stopped as a whole nobody has made any. What was seen before a meeting is forgotten, since all were
there. Ranks look within their node alone, where a look is one at memory: another node's would be a message that a
stopped rank does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.log import logger
from hpctrain.transport.activity import timeout_seconds

PART = 0.1  # of HPCTRAIN_TIMEOUT that a rank may take for a step
STEPS = 10  # that this rank must have made meanwhile
PAUSE = 1.0  # seconds between two looks


@dataclass(frozen=True)
class _Seen:
    """Say at which step a rank was first seen, when that was, and at which step this one was then."""

    step: int
    when: float
    own: int


class Stalls:
    """Look at the ranks of a node now and then, as one of them: the first that does not stand still itself speaks.

    ``step_of`` tells a rank's step, ``met`` how many meetings this one has been to.
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
        self._said: dict[int, float] = {}  # who stands still, since when

    def look(self, step: int) -> None:
        """Come after a step, about to make this one."""
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
                "rank %d has made no step for %.1f s, the others go on: it is in step %d", rank, seconds, seen.step
            )

    def _take_back(self, rank: int, now: float) -> None:
        since = self._said.pop(rank, None)
        if since is not None:
            logger.warning("rank %d makes steps again, after %.1f s", rank, now - since)
