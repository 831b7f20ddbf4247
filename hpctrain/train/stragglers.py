"""Detection of ranks that are slower than the others in a synchronous run, and the cause.

A slow rank makes all ranks wait in the step's communication. So each rank measures its own time: the
time of a step without waiting for other ranks. Each rank sends its speed, the inverse of this time, with
the message that the ranks exchange at the end of a step. The mean of it tells each rank how fast the
others are. Only when a rank has been slow for several steps, the ranks send their times by cause.

The speeds are averaged, and not the times: one very slow rank would make the mean time so long that
another slow rank would not be noticed.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.waiting import waiting
from hpctrain.log import logger
from hpctrain.util.text import counted, format_seconds

LOADER, COMPUTE, SAVING, COMMUNICATION = CAUSES = ("loader", "compute", "saving", "communication")
LEAST_SECONDS = 0.005  # per step: a smaller difference is not reported, because short steps vary by that much
MORE_SAMPLES = 1.1  # weight of this rank's samples from which its step is longer by nature

Times = Mapping[str, float]


@dataclass(frozen=True)
class _Change:
    """Times of a rank by cause, and its slow steps if it has become slow, is slow, or is so no longer."""

    host: str
    place: str  # coordinates in the mesh, as text
    times: dict[str, float]  # mean seconds per step by cause
    first_step: int  # of the slow steps
    slow_steps: int  # 0: nothing to report
    ended: bool  # the rank is no longer slow
    seconds_lost: float


class OwnTime:
    """Seconds of this rank's step by cause, without the time in which it waited for other ranks.

    The time in communication is measured, too: a rank with a slow network waits longer than the others.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, waited: Callable[[], float] = lambda: waiting.total
    ) -> None:
        self._clock, self._waited = clock, waited
        self._began: tuple[float, float] | None = None
        self.seconds = dict.fromkeys(CAUSES, 0.0)

    def start(self) -> None:
        """Measure from now on, until ``stop``; times are added to those before."""
        self._began = self._clock(), self._waited()

    def start_once(self) -> None:
        """Measure from now on, unless the measurement has started before."""
        if self._began is None:
            self.start()

    def stop(self) -> None:
        """End the measurement; what no other cause has taken is computation."""
        if self._began is None:
            return
        own, waited = self._since(*self._began)
        self._began = None
        self.seconds[COMPUTE] += own
        self.seconds[COMMUNICATION] += waited

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Count the own time of a block as that of a cause."""
        if self._began is None:
            yield
            return
        began = self._clock(), self._waited()
        try:
            yield
        finally:
            own, _ = self._since(*began)
            self.seconds[cause] += own
            self.seconds[COMPUTE] -= own  # it is part of what ``stop`` adds

    def take(self) -> dict[str, float]:
        """Return the seconds of a step by cause, and begin the next step."""
        found, self.seconds = self.seconds, dict.fromkeys(CAUSES, 0.0)
        return {cause: max(seconds, 0.0) for cause, seconds in found.items()}

    def _since(self, began: float, waited_before: float) -> tuple[float, float]:
        waited = self._waited() - waited_before
        return max(self._clock() - began - waited, 0.0), waited


class StragglerMonitor:
    """Comparison of this rank's times with those of the other ranks, after every step.

    ``factor`` and ``steps``: a rank is slow if its own time is at least this many times that of the
    others in that many consecutive steps. ``record`` gets the facts of a slow rank on every rank;
    ``time`` measures this rank.
    """

    def __init__(
        self,
        comm: Communicator,
        factor: float,
        steps: int,
        record: Callable[[Mapping[str, Any]], None],
        *,
        place: str = "",
        own_time: OwnTime | None = None,
    ) -> None:
        self._comm, self._factor, self._steps, self._record, self._place = comm, factor, steps, record, place
        self.time = OwnTime() if own_time is None else own_time
        self._recent: deque[dict[str, float]] = deque(maxlen=steps)
        self._own = self._arrival = 0.0  # seconds of the step that is about to be compared
        self._slow = self._normal = self._first = 0  # consecutive steps, and the first of the slow ones
        self._next_report = steps  # number of slow steps
        self._lost = 0.0
        self._has_reported = self._ended = False

    # Every step -------------------------------------------------------------------------------------------------------

    @property
    def wants_report(self) -> bool:
        """Whether this rank has become slow, has been slow for long since its last report, or is no longer slow."""
        return self._ended or self._slow >= self._next_report

    def speeds(self) -> tuple[float, float]:
        """Return what this rank sends: the inverses of its own time, and of the time until it has arrived here."""
        self._recent.append(self.time.take())
        times = self._recent[-1]
        self._arrival = sum(times.values())
        self._own = self._arrival - times[COMMUNICATION]
        return _inverse(self._own), _inverse(self._arrival)

    def compare(self, step: int, means: tuple[float, float], weight: float) -> None:
        """Compare a step with the mean speeds of all ranks; ``weight`` is the weight of this rank's samples."""
        if weight > MORE_SAMPLES:
            return  # neither slow nor normal: it has more samples than the others
        late = max(self._late(self._own, means[0]), self._late(self._arrival, means[1]))
        if late:
            if not self._slow:
                self._first = step
            self._slow, self._normal, self._lost = self._slow + 1, 0, self._lost + late
            return
        self._normal += 1
        if self._has_reported:
            self._ended = self._normal >= self._steps
        else:
            self._slow, self._lost = 0, 0.0

    def _late(self, seconds: float, mean_speed: float) -> float:
        """Return by how many seconds this rank is slower than the others; 0 if it is not slow."""
        size = self._comm.size
        others = (mean_speed * size - _inverse(seconds)) / (size - 1)
        if others <= 0 or seconds * others < self._factor:
            return 0.0
        late = seconds - 1 / others
        return late if late >= LEAST_SECONDS else 0.0

    # Reports ----------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Tell all ranks which ranks are slow, and why; rank 0 logs it. Collective."""
        wants, ended = self.wants_report, self._ended
        times = {cause: mean(one[cause] for one in self._recent) if self._recent else 0.0 for cause in CAUSES}
        slow_steps = self._slow if wants else 0
        own = _Change(socket.gethostname(), self._place, times, self._first, slow_steps, ended, self._lost)
        is_first = wants and not self._has_reported
        changes: list[tuple[_Change, bool]] = self._comm.all_gather_object((own, is_first))
        if wants:
            self._has_reported, self._next_report = not ended, self._slow * 2
        if ended:
            self._slow, self._lost, self._ended, self._next_report = 0, 0.0, False, self._steps
        everyone = [change.times for change, _ in changes]
        for rank, (change, is_new) in enumerate(changes):
            if change.slow_steps:
                self._tell(rank, change, everyone, is_new=is_new)

    def finish(self) -> None:
        """Report the slow steps since the last report, at the end of a run. Collective."""
        self._next_report = self._slow if self._has_reported and self._slow else self._next_report
        flag = torch.tensor([float(self.wants_report)])
        self._comm.all_reduce(flag, "max")
        if flag.item():
            self.report()

    def _tell(self, rank: int, change: _Change, everyone: Sequence[Times], *, is_new: bool) -> None:
        """Record a slow rank, and log it on rank 0 when it has become slow, or is so no longer."""
        cause, own, others = slowest_part(rank, everyone)
        named = f"rank {rank} on {change.host}" + (f" ({change.place})" if change.place else "")
        facts = {"rank": rank, "host": change.host, "first_step": change.first_step, "slow_steps": change.slow_steps}
        facts |= {"seconds_lost": round(change.seconds_lost, 3)}
        self._record({**facts, "cause": cause} if is_new else facts)  # later, the rank may be normal again
        if self._comm.rank:
            return
        if is_new:
            logger.warning(
                "%s is slow: all ranks have waited for it in %s since step %d; cause: %s, %s per step, other ranks %s",
                named,
                counted(change.slow_steps, "step"),
                change.first_step,
                cause,
                format_seconds(own),
                format_seconds(others),
            )
        elif change.ended:
            text = "%s is no longer slow, after %s and %s lost"
            logger.warning(text, named, counted(change.slow_steps, "slow step"), format_seconds(change.seconds_lost))


def slowest_part(rank: int, everyone: Sequence[Times]) -> tuple[str, float, float]:
    """Return the cause in which a rank exceeds the median of the others the most, its seconds, and that median."""
    rest = [times for number, times in enumerate(everyone) if number != rank]
    others = {cause: median(times[cause] for times in rest) for cause in CAUSES}
    cause = max(CAUSES, key=lambda name: everyone[rank][name] - others[name])
    return cause, everyone[rank][cause], others[cause]


def _inverse(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else 0.0
