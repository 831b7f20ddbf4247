"""Timing of steps, interleaved in random order, with a record of each rank's spans."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piping.candidates import Candidate
from piping.task import Task

from hpctrain import trace
from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.pipeline.timeline import TimelineSpan
from hpctrain.train.profile.record import clock_offsets


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


Steps = dict[str, list[Step]]


def take_turns(comm: Communicator, candidates: Mapping[str, Candidate], task: Task, warmup: int, rounds: int) -> Steps:
    """Return this rank's timed steps, by candidate. Collective."""
    steps: Steps = {name: [] for name in candidates}
    ahead = clock_offsets(comm)[comm.rank]
    draw = random.Random(0)
    for number in range(warmup + rounds):
        for name in draw.sample(list(candidates), len(candidates)):
            found = _timed(comm, candidates[name], task, number, ahead)
            if number >= warmup:
                steps[name].append(found)
    return steps


def _timed(comm: Communicator, one: Candidate, task: Task, number: int, ahead: float) -> Step:
    batch = task.batch(number, one.microbatches)
    one.model.zero_grad()
    gc.collect()
    gc.disable()
    comm.barrier()
    trace.start()
    try:
        started = time.monotonic()
        one.step(*batch)
        ended = time.monotonic()
    finally:
        recorded = trace.take()
        gc.enable()
    return Step(started - ahead, ended - ahead, _spans(recorded.spans, ahead))


def _spans(spans: Sequence[trace.Span], ahead: float) -> tuple[TimelineSpan, ...]:
    """Return spans ordered by their start."""
    found = (
        TimelineSpan(one.name, one.start - ahead, one.end - ahead, one.facts.get("chunk"), one.facts.get("microbatch"))
        for one in spans
    )
    return tuple(sorted(found, key=lambda one: (one.start, -one.end)))
