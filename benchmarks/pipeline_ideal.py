"""Comparison of measured pipeline steps with a simulation of the same schedule without overhead.

``ideal`` uses the median time of each kind of pass of each chunk. ``played`` uses the time of each
single pass in each step: the rest is the overhead of the pipeline itself, even if other processes
on the machine slow passes down.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.stats import covered

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
        return self.end - self.start


Ranks = Sequence[Step]  # one step of all ranks


@dataclass(frozen=True)
class ScheduleCost:
    """Measured steps of a schedule and their ideal time, in seconds."""

    measured: float
    ideal: float
    played: float
    bubble: dict[str, float | None]  # idle share of all ranks: measured, simulated, by the formula if there is one
    shares: list[dict[str, float]]  # of each rank's step: passes, sending, waiting for others, and the rest
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
        bubble={
            "measured": statistics.median(timeline(ranks).bubble for ranks in steps),
            "simulated": simulated.bubble,
            "formula": formula if schedule.name in FORMULA else None,
        },
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

    def within(span: TimelineSpan) -> TimelineSpan:
        return replace(span, start=max(span.start, begin), end=min(span.end, end))

    shown = [[one for one in step.spans if one.name in (*WORK, *WAITS)] for step in ranks]
    return Timeline(tuple(tuple(within(one) for one in row if one.start < end and one.end > begin) for row in shown))


def medians_of(schedule: Schedule, steps: Sequence[Ranks]) -> dict[str, list[float | None]]:
    """Return the median of each kind of pass of each chunk; None for passes that the schedule does not have."""
    found: dict[tuple[str, int | None], list[float]] = {}
    for span in (span for ranks in steps for step in ranks for span in step.spans):
        found.setdefault((span.name, span.chunk), []).append(span.end - span.start)
    keys = {word: [(word, chunk) for chunk in range(schedule.chunks)] for word in PASSES}
    return {
        word: [statistics.median(found[key]) if key in found else None for key in each]
        for word, each in keys.items()
        if any(key in found for key in each)
    }


def costs_of(schedule: Schedule, medians: Mapping[str, Sequence[float | None]]) -> Costs:
    """Return the costs for a simulation; passes that did not occur cost 0, as they are not simulated."""

    forward, backward, inputs, weight, update = (
        [each or 0.0 for each in medians.get(kind.word, [0.0] * schedule.chunks)]
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT, ActionKind.UPDATE)
    )
    return Costs(forward, backward, inputs, weight, update)


@dataclass(frozen=True)
class _Single(Costs):
    """Time of each single pass."""

    times: Mapping[Action, float] = field(default_factory=dict)

    def of(self, action: Action) -> float:
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


def shares(steps: Sequence[Step]) -> dict[str, float]:
    """Return the shares of one rank's steps, as medians."""

    def median(names: Sequence[str]) -> float:
        return statistics.median(share_of(step, names) for step in steps)

    waiting = [word for word in WAITS if word != SENDING]
    rest = 1 - median((*PASSES, *WAITS))
    return {"passes": median(PASSES), "sending": median([SENDING]), "waiting": median(waiting), "rest": rest}


def share_of(step: Step, names: Collection[str]) -> float:
    """Return the fraction of a step that spans of these names cover."""
    spans = [(max(span.start, step.start), min(span.end, step.end)) for span in step.spans if span.name in names]
    return covered(spans) / step.seconds
