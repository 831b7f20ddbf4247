"""Comparison of measured pipeline steps with a simulation of the same schedule without overhead.

``ideal`` uses the median time of each kind of pass of each chunk. ``played`` uses the time of each
single pass in each step: the rest is the overhead of the pipeline itself, even if other processes
on the machine slow passes down.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.parallel.pipeline.schedules import Action, ActionKind, Schedule
from hpctrain.parallel.pipeline.timeline import WAITS, WORK, Costs, Timeline, TimelineSpan, simulate

FORMULA = ("gpipe", "1f1b")  # schedules whose idle share is (p-1)/(m+p-1) if all stages take the same time
PASSES = tuple(kind.word for kind in ActionKind)
SENDING = "send"


@dataclass(frozen=True)
class Step:
    """Step of this rank: start and end by rank 0's clock, and its spans."""

    start: float
    end: float
    spans: tuple[TimelineSpan, ...]

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.end - self.start


Ranks = Sequence[Step]  # one step of all ranks


@dataclass(frozen=True)
class Shares:
    """Shares of a rank's step: passes, sending, waiting for others, and the rest."""

    passes: float
    sending: float
    waiting: float
    rest: float


@dataclass(frozen=True)
class Bubble:
    """Idle share of all ranks: measured, simulated, and by the formula if there is one."""

    measured: float
    simulated: float
    formula: float | None


@dataclass(frozen=True)
class ScheduleCost:
    """Measured steps of a schedule and their ideal time, in seconds."""

    measured: float
    ideal: float
    played: float
    bubble: Bubble
    shares: list[Shares]  # of each rank
    medians: dict[str, list[float | None]]  # of each kind of pass, by chunk

    @property
    def efficiency(self) -> float:
        """Return the fraction of the measured time that the schedule would need with these passes."""
        return self.ideal / self.measured


def compare(schedule: Schedule, steps: Sequence[Ranks]) -> ScheduleCost:
    """Return the comparison of a schedule's measured steps with their ideal."""
    medians = medians_of(schedule, steps)
    simulated = simulate(schedule, costs_of(schedule, medians))
    formula = (schedule.ranks - 1) / (schedule.microbatches + schedule.ranks - 1)
    return ScheduleCost(
        measured=statistics.median(seconds(ranks) for ranks in steps),
        ideal=simulated.makespan,
        played=statistics.median(played(schedule, ranks) / seconds(ranks) for ranks in steps),
        bubble=Bubble(
            statistics.median(timeline(ranks).bubble for ranks in steps),
            simulated.bubble,
            formula if schedule.name in FORMULA else None,
        ),
        shares=[shares([ranks[rank] for ranks in steps]) for rank in range(schedule.ranks)],
        medians=medians,
    )


def seconds(ranks: Ranks) -> float:
    """Return the time of a step, on the slowest rank."""
    return max(step.seconds for step in ranks)


def timeline(ranks: Ranks) -> Timeline:
    """Return the spans of all ranks from the first pass to the last."""
    passes = [span for step in ranks for span in step.spans if span.name in PASSES]
    begin, end = min(span.start for span in passes), max(span.end for span in passes)
    return Timeline(tuple(tuple(_within(step.spans, begin, end)) for step in ranks))


def _within(spans: Iterable[TimelineSpan], begin: float, end: float) -> Iterable[TimelineSpan]:
    for span in spans:
        if span.name in (*WORK, *WAITS) and span.start < end and span.end > begin:
            yield TimelineSpan(span.name, max(span.start, begin), min(span.end, end), span.chunk, span.microbatch)


def medians_of(schedule: Schedule, steps: Sequence[Ranks]) -> dict[str, list[float | None]]:
    """Return the median of each kind of pass of each chunk; None for passes that the schedule does not have."""
    found: dict[tuple[str, int | None], list[float]] = {}
    for span in (span for ranks in steps for step in ranks for span in step.spans):
        found.setdefault((span.name, span.chunk), []).append(span.end - span.start)
    return {
        word: [statistics.median(found[word, chunk]) if (word, chunk) in found else None for chunk in _chunks(schedule)]
        for word in PASSES
        if any((word, chunk) in found for chunk in _chunks(schedule))
    }


def costs_of(schedule: Schedule, medians: Mapping[str, Sequence[float | None]]) -> Costs:
    """Return the costs for a simulation; passes that did not occur cost 0, as they are not simulated."""

    def of(kind: ActionKind) -> list[float]:
        return [each or 0.0 for each in medians.get(kind.word, [0.0] * schedule.chunks)]

    return Costs(
        of(ActionKind.FORWARD),
        of(ActionKind.BACKWARD),
        of(ActionKind.INPUT),
        of(ActionKind.WEIGHT),
        of(ActionKind.UPDATE),
    )


@dataclass(frozen=True)
class _Single(Costs):
    """Time of each single pass."""

    times: Mapping[Action, float] = field(default_factory=dict)

    def of(self, action: Action) -> float:
        """Return the time of this pass."""
        return self.times[action]


def played(schedule: Schedule, ranks: Ranks) -> float:
    """Return the time of a step if every pass takes its measured time, and everything else takes no time."""
    kinds = {kind.word: kind for kind in ActionKind}
    times = {
        Action(kinds[span.name], span.chunk, span.microbatch): span.end - span.start
        for step in ranks
        for span in step.spans
        if span.name in kinds and span.chunk is not None and span.microbatch is not None
    }
    nothing = [0.0] * schedule.chunks
    return simulate(schedule, _Single(nothing, nothing, nothing, nothing, nothing, times=times)).makespan


def shares(steps: Sequence[Step]) -> Shares:
    """Return the shares of one rank's steps, as medians."""

    def median(names: Sequence[str]) -> float:
        return statistics.median(covered(step, names) / step.seconds for step in steps)

    everything = (*PASSES, *WAITS)
    waiting = tuple(word for word in WAITS if word != SENDING)
    return Shares(median(PASSES), median([SENDING]), median(waiting), 1 - median(everything))


def covered(step: Step, names: Sequence[str]) -> float:
    """Return the seconds of a step that spans of these names cover."""
    total, until = 0.0, step.start
    for span in step.spans:  # ordered by their start
        if span.name in names:
            total += max(min(span.end, step.end) - max(span.start, until), 0.0)
            until = max(until, span.end)
    return total


def _chunks(schedule: Schedule) -> range:
    return range(schedule.chunks)
