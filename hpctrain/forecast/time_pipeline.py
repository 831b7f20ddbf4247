"""Time of a pipeline, by simulation of its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple

from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.time_passes import Passes
from hpctrain.parallel.pipeline.timeline import Costs, simulate


def pipeline(
    run: PlannedRun, layers: Sequence[Passes], cuts: Sequence[range], updates: Sequence[float], send: float
) -> dict[str, float]:
    """Return the parts of one backward pass of a run: the compute times of the slowest stage, and its bubble.

    ``cuts`` are the layers of each chunk, ``updates`` the seconds of an optimizer step of each
    stage, and ``send`` the seconds of a message between stages.
    """
    schedule = run.schedule
    assert schedule is not None  # there is more than one stage
    chunks = [_sum(layers[number] for number in cut) for cut in cuts]
    every = run.parallel.schedule == "pipedream"  # an optimizer step after each microbatch
    each = [updates[schedule.rank_of(number)] / run.parallel.chunks_a_rank * every for number in range(len(cuts))]
    timeline = simulate(schedule, costs_of(chunks, each, send))
    longest = max(range(schedule.ranks), key=timeline.busy)
    own = _sum(chunk for number, chunk in enumerate(chunks) if schedule.rank_of(number) == longest)
    busy = own.forward + own.backward + own.exchange
    return {
        "forward": run.microbatches * own.forward,
        "backward": run.microbatches * own.backward,
        "activations": run.microbatches * own.exchange,
        "bubble": max(timeline.makespan - run.microbatches * busy, 0.0),
    }


def costs_of(chunks: Sequence[Passes], updates: Sequence[float], send: float) -> Costs:
    """Return the costs for the simulation; each half of a split backward pass takes half of its time."""
    backward = [chunk.backward + chunk.exchange_backward for chunk in chunks]
    half = [seconds / 2 for seconds in backward]
    forward = [chunk.forward + chunk.exchange_forward for chunk in chunks]
    return Costs(forward=forward, backward=backward, input=half, weight=half, update=updates, send=send)


def _sum(passes: Iterable[Passes]) -> Passes:
    """Return the sum of several passes."""
    return Passes(*(sum(numbers) for numbers in zip(*map(astuple, passes))))
