"""Timeline of each rank of a pipeline, measured or simulated from a schedule and the time of each pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.schedules import LIVE_CHANGE, Action, ActionKind, Schedule

PASSES = ("forward", "backward", "input", "weight")
WORK = (*(kind.word for kind in ActionKind), "loss", "optimizer")
WAITS = ("send", "receive", "reduce", "wait")  # idle time, even inside work
_LIVE = {kind.word: change for kind, change in LIVE_CHANGE.items()}


@dataclass(frozen=True)
class TimelineSpan:
    """Activity of a rank from ``start`` to ``end``: a word of ``ActionKind`` in a simulation, any name in a trace."""

    name: str
    start: float
    end: float
    chunk: int | None = None
    microbatch: int | None = None


@dataclass(frozen=True)
class Timeline:
    """Spans of each rank, ordered by their start."""

    rows: tuple[tuple[TimelineSpan, ...], ...]

    @property
    def start(self) -> float:
        """Return the time at which the first rank started."""
        return min((span.start for row in self.rows for span in row), default=0.0)

    @property
    def makespan(self) -> float:
        """Return the time from the start of the first rank to the end of the last one."""
        return max((span.end for row in self.rows for span in row), default=0.0) - self.start

    def busy(self, rank: int) -> float:
        """Return the time that a rank worked, without waits inside its work."""
        edges: list[tuple[float, int, bool]] = []  # where spans begin (-1: first, if one ends there) and end (1)
        for span in self.rows[rank]:
            if span.name in WORK or span.name in WAITS:
                edges += [(span.start, -1, span.name in WAITS), (span.end, 1, span.name in WAITS)]
        total = since = 0.0
        working, waiting, was_busy = 0, 0, False
        for time, change, is_wait in sorted(edges):
            working, waiting = (working, waiting - change) if is_wait else (working - change, waiting)
            is_busy = working > 0 and not waiting
            if is_busy and not was_busy:
                since = time
            elif was_busy and not is_busy:
                total += time - since
            was_busy = is_busy
        return total

    def idle(self, rank: int) -> float:
        """Return the time that a rank was idle."""
        return self.makespan - self.busy(rank)

    @property
    def bubble(self) -> float:
        """Return the idle fraction of the time of all ranks."""
        total = self.makespan * len(self.rows)
        return sum(map(self.idle, range(len(self.rows)))) / total if total else 0.0

    def live(self, rank: int) -> list[tuple[float, int]]:
        """Return the times at which a rank's number of microbatches with held activations changes, and the new numbers.

        Activations count from the start of the forward pass to the end of the last pass that needs
        them.
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
        """Return the largest number of microbatches that a rank holds at once."""
        return max((count for _, count in self.live(rank)), default=0)


# Simulation -----------------------------------------------------------------------------------------------------------
#
# Receives block and sends do not. The order in which ranks are visited therefore makes no difference:
# once an action can be executed, it stays executable.


Dependency = tuple[str, int, int]  # "activations" or "gradients" of a chunk's inputs, chunk, microbatch


def execution_order(schedule: Schedule) -> tuple[list[tuple[int, Action]], dict[int, Action]]:
    """Return ranks and actions in an executable order, and the actions at which ranks wait forever."""
    done: set[Dependency | None] = set()
    positions = [0] * schedule.ranks
    order: list[tuple[int, Action]] = []
    progressed = True
    while progressed:
        progressed = False
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions) and done.issuperset(_needs(actions[positions[rank]], schedule.chunks)):
                action = actions[positions[rank]]
                done.add(_satisfies(action))
                order.append((rank, action))
                positions[rank] += 1
                progressed = True
    rows = zip(schedule.actions, positions)
    return order, {rank: row[at] for rank, (row, at) in enumerate(rows) if at < len(row)}


def _needs(action: Action, chunks: int) -> Iterator[Dependency]:
    """Yield the dependencies of an action: passes of the neighbouring chunks, and earlier passes of its own chunk."""
    chunk, microbatch = action.chunk, action.microbatch
    if action.kind is ActionKind.FORWARD and chunk:
        yield "activations", chunk - 1, microbatch
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT):
        yield "activations", chunk, microbatch
        if chunk + 1 < chunks:
            yield "gradients", chunk + 1, microbatch
    if action.kind is ActionKind.WEIGHT:
        yield "gradients", chunk, microbatch


def _satisfies(action: Action) -> Dependency | None:
    """Return the dependency that an action satisfies."""
    if action.kind is ActionKind.FORWARD:
        return "activations", action.chunk, action.microbatch
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT):
        return "gradients", action.chunk, action.microbatch
    return None


@dataclass(frozen=True)
class Costs:
    """Times of the passes of each chunk by ``ActionKind.word``, and of a message from one rank to another."""

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
        """Return the time of an action; a benchmark overrides it by the measured time of each single pass."""
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
    """Return equal times for every chunk; each half of a backward pass takes half its time by default."""
    if input is None:
        input = backward / 2 if weight is None else max(backward - weight, 0.0)
    weight = max(backward - input, 0.0) if weight is None else weight
    return Costs([forward] * chunks, [backward] * chunks, [input] * chunks, [weight] * chunks, [update] * chunks, send)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Return the timeline in which every rank executes each action as soon as possible.

    A message has a latency and does not stop any rank from working. Raises ``UsageError`` if the
    ranks deadlock.
    """
    order, blocked = execution_order(schedule)
    if blocked:
        raise UsageError(f"the schedule {schedule.name} cannot be executed: ranks wait for each other", everywhere=True)
    ready: dict[Dependency | None, tuple[float, int]] = {}  # time and rank at which it is ready
    free = [0.0] * schedule.ranks
    rows: list[list[TimelineSpan]] = [[] for _ in range(schedule.ranks)]
    for rank, action in order:
        start = free[rank]
        for need in _needs(action, schedule.chunks):
            when, where = ready[need]
            start = max(start, when if where == rank else when + costs.send)
        free[rank] = start + costs.of(action)
        ready[_satisfies(action)] = (free[rank], rank)
        rows[rank].append(TimelineSpan(action.kind.word, start, free[rank], action.chunk, action.microbatch))
    return Timeline(tuple(map(tuple, rows)))
