"""Simulated timelines: idle time and memory by the formulas of the papers, exact for whole numbers."""

from __future__ import annotations

import random

import pytest

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.schedules import SCHEDULES, make
from hpctrain.parallel.pipeline.timeline import Costs, Timeline, TimelineSpan, equal_costs, simulate

GRID = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 4, 8, 11, 16)]


def played(name: str, p: int, m: int, chunks: int = 1, **times: float) -> Timeline:
    schedule = make(name, p, m, chunks)
    return simulate(schedule, equal_costs(schedule.chunks, **times))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream"])
@pytest.mark.parametrize("times", [{"forward": 1, "backward": 2}, {"forward": 3, "backward": 5}])
def test_the_bubble_of_gpipe_and_1f1b_is_exact(name: str, times: dict[str, float]) -> None:
    for p, m in GRID:
        timeline = played(name, p, m, **times)
        assert timeline.makespan == (m + p - 1) * sum(times.values())
        assert timeline.bubble == (p - 1) / (m + p - 1)
        assert [timeline.idle(rank) for rank in range(p)] == [(p - 1) * sum(times.values())] * p


def test_naive_keeps_one_stage_busy_at_a_time() -> None:
    for p, m in GRID:
        timeline = played("naive", p, m)
        assert timeline.makespan == 3 * p * m and timeline.bubble == (p - 1) / p
        spans = sorted((span.start, span.end) for row in timeline.rows for span in row)
        assert all(first[1] == second[0] for first, second in zip(spans, spans[1:]))


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(chunks: int) -> None:
    for p, m in [(p, p * groups) for p in range(1, 9) for groups in (1, 2, 4)]:
        timeline = played("interleaved", p, m, chunks)  # in units of a chunk
        assert timeline.makespan == 3 * (m * chunks + p - 1)
        assert timeline.bubble == (p - 1) / (m * chunks + p - 1)


@pytest.mark.parametrize("forward, input, weight", [(1, 1, 1), (2, 2, 1), (4, 5, 3), (3, 4, 3)])
def test_zero_bubble_has_the_idle_time_of_the_paper(forward: float, input: float, weight: float) -> None:
    whole = forward + input + weight
    for p, m in GRID:
        if m < p:
            continue
        timeline = played("zb-h1", p, m, forward=forward, backward=input + weight, input=input, weight=weight)
        assert timeline.makespan == m * whole + (p - 1) * (forward + input - weight)
        plain = played("1f1b", p, m, forward=forward, backward=input + weight)
        assert timeline.makespan < plain.makespan or p == 1


def test_zero_bubble_is_never_slower_with_few_microbatches() -> None:
    for p, m in GRID:
        assert played("zb-h1", p, m).makespan <= played("1f1b", p, m).makespan


@pytest.mark.parametrize("name", SCHEDULES)
def test_live_microbatches_over_time_equal_those_of_the_schedule(name: str) -> None:
    for p, m in GRID:
        if name == "interleaved" and m % p:
            continue
        schedule = make(name, p, m, 2 if name == "interleaved" else 1)
        timeline = simulate(schedule, equal_costs(schedule.chunks))
        for rank in range(p):
            counts = [count for _, count in timeline.live(rank)]
            assert max(counts) == timeline.most_live(rank) == schedule.live(rank)
            assert counts[-1] == 0 and len(counts) == 2 * m * schedule.chunks // p
            times = [when for when, _ in timeline.live(rank)]
            assert times == sorted(times)


def test_live_changes_at_the_begin_of_forward_and_the_end_of_backward_passes() -> None:
    timeline = played("1f1b", 2, 2)
    assert timeline.live(0) == [(0, 1), (1, 2), (6, 1), (9, 0)]
    assert timeline.live(1) == [(1, 1), (4, 0), (4, 1), (7, 0)]


def test_passes_begin_as_soon_as_their_dependencies_are_met() -> None:
    """Compute each start by hand: it is the latest end of its dependencies."""
    send = 0.25
    schedule = make("interleaved", 3, 6, 2)
    timeline = simulate(schedule, equal_costs(6, forward=1, backward=1.5, send=send))
    spans = {(span.name, span.chunk, span.microbatch): span for row in timeline.rows for span in row}
    for row in timeline.rows:
        for before, span in zip((None, *row), row):
            reasons = [before.end] if before else [0.0]
            if span.name == "forward" and span.chunk:
                reasons.append(spans["forward", span.chunk - 1, span.microbatch].end + send)
            if span.name == "backward" and span.chunk == 5:
                reasons.append(spans["forward", 5, span.microbatch].end)
            if span.name == "backward" and span.chunk != 5:
                reasons.append(spans["backward", (span.chunk or 0) + 1, span.microbatch].end + send)
            assert span.start == max(reasons)
            assert span.end - span.start == {"forward": 1, "backward": 1.5}[span.name]


def test_a_message_within_a_rank_takes_no_time() -> None:
    assert played("interleaved", 1, 2, 2, send=100).makespan == 12
    assert played("naive", 2, 1, send=100).makespan == 6 + 200


def test_chunks_may_take_different_times() -> None:
    costs = Costs(forward=[1, 4], backward=[2, 8], input=[1, 4], weight=[1, 4], update=[0, 0])
    timeline = simulate(make("1f1b", 2, 4), costs)
    assert timeline.makespan == 1 + 4 * 12 + 2  # the slow stage determines the time
    assert timeline.busy(0) == 12 and timeline.busy(1) == 48
    assert timeline.bubble == 1 - 60 / (2 * 51)


def test_updates_take_time() -> None:
    assert played("pipedream", 1, 4, update=0.5).makespan == 4 * 3 + 3 * 0.5
    assert {span.name for span in played("pipedream", 1, 2).rows[0]} == {"forward", "backward", "update"}


@pytest.mark.parametrize(
    "times, halves",
    [({}, (1, 1)), ({"input": 0.5}, (0.5, 1.5)), ({"weight": 0.5}, (1.5, 0.5)), ({"input": 3, "weight": 4}, (3, 4))],
)
def test_halves_of_a_backward_pass_have_their_own_times(times: dict[str, float], halves: tuple[float, float]) -> None:
    costs = equal_costs(1, forward=1, backward=2, **times)
    assert (costs.input[0], costs.weight[0]) == halves


@pytest.mark.parametrize("time", [-1, float("nan"), float("inf")])
def test_negative_and_infinite_times_are_refused(time: float) -> None:
    with pytest.raises(UsageError, match="must not be negative, nor infinite"):
        equal_costs(2, send=time)


def test_a_wait_inside_a_pass_is_idle_time() -> None:
    row = (
        TimelineSpan("forward", 0, 4),
        TimelineSpan("reduce", 1, 2),
        TimelineSpan("receive", 1.5, 3),  # together with the previous one: from 1 to 3
        TimelineSpan("send", 5, 6),  # outside any pass
        TimelineSpan("backward", 6, 9),
        TimelineSpan("weight", 8, 10),  # overlaps
        TimelineSpan("data", 10, 12),  # neither work nor waiting
    )
    timeline = Timeline((row, ()))
    assert timeline.busy(0) == 2 + 4 and timeline.makespan == 12
    assert timeline.idle(1) == 12 and timeline.bubble == 18 / 24


def test_busy_time_is_work_without_waiting() -> None:
    draw = random.Random(3)
    for _ in range(50):
        spans = []
        for name in ["forward", "backward", "reduce", "wait"] * 3:
            begin = draw.randrange(40)
            spans.append(TimelineSpan(name, begin, begin + draw.randrange(1, 9)))
        moments = {
            kind: {moment for span in spans if span.name in names for moment in range(int(span.start), int(span.end))}
            for kind, names in {"work": ("forward", "backward"), "wait": ("reduce", "wait")}.items()
        }
        assert Timeline((tuple(spans),)).busy(0) == len(moments["work"] - moments["wait"])


def test_an_empty_timeline_takes_no_time() -> None:
    timeline = Timeline(((), ()))
    assert (timeline.makespan, timeline.bubble, timeline.live(0), timeline.most_live(0)) == (0, 0, [], 0)
