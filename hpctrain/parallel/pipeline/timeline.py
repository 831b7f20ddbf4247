"""Work out when each rank of a pipeline is at work, from a schedule and the time of each pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.action import Action, Kind
from hpctrain.parallel.pipeline.order import Done, gives, needs, playable
from hpctrain.parallel.pipeline.schedule import CHANGE, Schedule

WORK = (*(kind.word for kind in Kind), "loss", "optimizer")
WAITS = ("send", "receive", "reduce", "wait")  # idle, even in the middle of work
_LIVE = {kind.word: change for kind, change in CHANGE.items()}

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """Say what a rank did from ``start`` to ``end``: a word of ``Kind`` in a simulation, any name of a trace."""

    name: str
    start: float
    end: float
    chunk: int | None = None
    microbatch: int | None = None


@dataclass(frozen=True)
class Timeline:
    """Hold the spans of each rank, those of a rank in the order in which they began."""

    rows: tuple[tuple[Span, ...], ...]

    @property
    def start(self) -> float:
        """Return when the first rank began."""
        return min((span.start for row in self.rows for span in row), default=0.0)

    @property
    def makespan(self) -> float:
        """Return the time from the first rank's begin to the last one's end."""
        return max((span.end for row in self.rows for span in row), default=0.0) - self.start

    def busy(self, rank: int) -> float:
        """Return how long a rank was at work, without what it waited in the middle of it."""
        work = _merged((span.start, span.end) for span in self.rows[rank] if span.name in WORK)
        waits = _merged((span.start, span.end) for span in self.rows[rank] if span.name in WAITS)
        return _length(work) - _length(_common(work, waits))

    def idle(self, rank: int) -> float:
        """Return how long a rank was idle."""
        return self.makespan - self.busy(rank)

    @property
    def bubble(self) -> float:
        """Return the share of the time of all ranks that they were idle."""
        whole = self.makespan * len(self.rows)
        return sum(map(self.idle, range(len(self.rows)))) / whole if whole else 0.0

    def live(self, rank: int) -> list[tuple[float, int]]:
        """Return when the number of microbatches whose activations a rank holds changes, and to what.

        Activations count from the begin of the forward pass to the end of the last pass that needs them.
        """
        found: list[tuple[float, int]] = []
        now = 0
        for span in sorted(self.rows[rank], key=lambda span: (span.start, span.end)):
            change = _LIVE.get(span.name, 0)
            if change:
                now += change
                found.append((span.start if change > 0 else span.end, now))
        return found

    def most_live(self, rank: int) -> int:
        """Return the most microbatches that a rank holds at once."""
        return max((count for _, count in self.live(rank)), default=0)


@dataclass(frozen=True)
class Costs:
    """Hold the time of each pass for each chunk, of an update, and of a message from one rank to another."""

    forward: Sequence[float]
    backward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    update: Sequence[float]
    send: float = 0.0

    def __post_init__(self) -> None:
        numbers = [self.send, *self.forward, *self.backward, *self.input, *self.weight, *self.update]
        if not all(0 <= number < float("inf") for number in numbers):
            raise UsageError("the time of a pass or a message must not be negative, nor infinite")

    def of(self, action: Action) -> float:
        """Return the time of an action."""
        times: Sequence[float] = getattr(self, action.kind.word)
        return times[action.chunk]


def equal_costs(
    chunks: int,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    input: float | None = None,
    weight: float | None = None,
    update: float = 0.0,
    send: float = 0.0,
) -> Costs:
    """Return the same times for every chunk; the halves of a backward pass take half of it each unless told."""
    input, weight = _halves(backward, input, weight)
    whole = [forward] * chunks, [backward] * chunks
    return Costs(*whole, [input] * chunks, [weight] * chunks, [update] * chunks, send)


def _halves(backward: float, input: float | None, weight: float | None) -> tuple[float, float]:
    if input is None:
        input = backward / 2 if weight is None else max(backward - weight, 0.0)
    return input, max(backward - input, 0.0) if weight is None else weight


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Return when everything happens if every rank does its next action as soon as it can.

    A message takes its time and keeps nobody from working. Raises ``UsageError`` where ranks wait for each other.
    """
    order = playable(schedule)
    if order.stuck:
        raise UsageError(f"the schedule {schedule.name} cannot be played: ranks wait for each other", everywhere=True)
    ready: dict[Done | None, tuple[float, int]] = {}  # when, and on which rank
    free = [0.0] * schedule.ranks
    rows: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for rank, action in order.actions:
        start = free[rank]
        for need in needs(action, schedule.chunks):
            when, where = ready[need]
            start = max(start, when if where == rank else when + costs.send)
        free[rank] = start + costs.of(action)
        ready[gives(action)] = (free[rank], rank)
        rows[rank].append(Span(action.kind.word, start, free[rank], action.chunk, action.microbatch))
    return Timeline(tuple(map(tuple, rows)))


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points in time as intervals that do not touch, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _common(one: Sequence[Interval], two: Sequence[Interval]) -> Iterator[Interval]:
    """Yield what two lists of ordered intervals have in common."""
    first = second = 0
    while first < len(one) and second < len(two):
        (a, b), (c, d) = one[first], two[second]
        if max(a, c) < min(b, d):
            yield max(a, c), min(b, d)
        if b < d:
            first += 1
        else:
            second += 1


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
