from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from pipeline_ideal import Step, compare, medians_of, played, seconds, share_of, shares, timeline

from hpctrain.parallel.pipeline.schedules import Schedule, make
from hpctrain.parallel.pipeline.timeline import TimelineSpan, equal_costs, simulate

SCHEDULES = [("gpipe", 8, 1), ("1f1b", 4, 1), ("interleaved", 4, 2), ("zb-h1", 4, 1), ("naive", 2, 1)]


def perfect(schedule: Schedule, *, stretch: float = 1.0, late: float = 0.0) -> tuple[Step, ...]:
    """Return an ideal step plus ``late`` seconds at its end, with all times stretched."""
    rows = simulate(schedule, equal_costs(schedule.chunks, forward=1, backward=2)).rows
    end = max(span.end for row in rows for span in row) * stretch
    return tuple(
        Step(
            100.0,
            100.0 + end + late,
            tuple(
                TimelineSpan(one.name, 100 + one.start * stretch, 100 + one.end * stretch, one.chunk, one.microbatch)
                for one in row
            ),
        )
        for row in rows
    )


@pytest.mark.parametrize("name, microbatches, chunks", SCHEDULES)
def test_a_step_without_losses_equals_its_ideal(name: str, microbatches: int, chunks: int) -> None:
    schedule = make(name, 2, microbatches, chunks)
    held = compare(schedule, [perfect(schedule)] * 3)
    assert held.efficiency == pytest.approx(1) and held.played == pytest.approx(1)
    assert held.bubble["measured"] == pytest.approx(held.bubble["simulated"])
    if name in ("gpipe", "1f1b"):
        assert held.bubble["measured"] == pytest.approx(1 / (microbatches + 1)) == pytest.approx(held.bubble["formula"])
    else:
        assert held.bubble["formula"] is None


def test_lost_time_lowers_the_efficiency() -> None:
    schedule = make("1f1b", 2, 4)
    whole = seconds(perfect(schedule))
    held = compare(schedule, [perfect(schedule, late=whole)] * 2)
    assert held.measured == pytest.approx(2 * whole) and held.ideal == pytest.approx(whole)
    assert held.efficiency == pytest.approx(0.5) and held.played == pytest.approx(0.5)
    # One of three steps is stretched by other work: this shows in single times, but not in medians.
    steps = [perfect(schedule), perfect(schedule), perfect(schedule, stretch=3)]
    assert compare(schedule, steps).efficiency == pytest.approx(1)
    assert played(schedule, steps[2]) == pytest.approx(3 * whole)


def test_medians_are_taken_per_kind_and_chunk() -> None:
    schedule = make("interleaved", 2, 2, 2)
    step = perfect(schedule)
    slower = tuple(
        Step(one.start, one.end, tuple(replace(span, end=span.end + (span.chunk or 0)) for span in one.spans))
        for one in step
    )
    found = medians_of(schedule, [slower, perfect(schedule, stretch=50), slower])
    assert found == {"forward": pytest.approx([1, 2, 3, 4]), "backward": pytest.approx([2, 3, 4, 5])}


def test_a_timeline_spans_the_first_to_the_last_pass() -> None:
    spans = spans_of(("wait", 0, 2), ("forward", 2, 4), ("receive", 4, 7), ("step", 0, 9), ("backward", 7, 8))
    other = spans_of(("receive", 1, 5), ("forward", 5, 6))
    found = timeline([Step(0, 9, tuple(spans)), Step(0, 9, tuple(other))])
    assert found.start == 2 and found.makespan == 6
    assert [span.name for span in found.rows[0]] == ["forward", "receive", "backward"]
    assert (found.rows[1][0].start, found.busy(0), found.busy(1)) == (2, 3, 1)
    assert found.bubble == pytest.approx(1 - 4 / 12)


def test_overlapping_time_counts_once_and_time_outside_the_step_is_ignored() -> None:
    spans = spans_of(("wait", -1, 1), ("receive", 2, 5), ("wait", 3, 4), ("receive", 4, 6), ("send", 9, 12))
    step = Step(0, 10, tuple(spans))
    assert share_of(step, ["wait", "receive"]) == 0.5 and share_of(step, ["send"]) == 0.1
    found = shares([step])
    assert found == {"passes": 0, "sending": 0.1, "waiting": 0.5, "rest": pytest.approx(0.4)}


def spans_of(*spans: tuple[str, float, float]) -> Iterable[TimelineSpan]:
    return [TimelineSpan(name, start, end) for name, start, end in spans]
