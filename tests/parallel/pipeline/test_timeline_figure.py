"""Plots of timelines: their boxes, numbers and colours."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.parallel.pipeline.render import COLOURS, figure
from hpctrain.parallel.pipeline.schedules import make
from hpctrain.parallel.pipeline.timeline import Timeline, TimelineSpan, equal_costs, simulate

pytest.importorskip("matplotlib")


def timeline(name: str, ranks: int, microbatches: int, chunks: int = 1, **times: float) -> Timeline:
    schedule = make(name, ranks, microbatches, chunks)
    return simulate(schedule, equal_costs(schedule.chunks, **times))


def boxes(found: Any) -> list[tuple[float, float, float]]:
    """Return begin, end and row of every white-rimmed box: the passes."""
    return sorted(
        (round(box.x0, 9), round(box.x1, 9), round(box.y0 + box.height / 2))
        for collection in found.axes[0].collections
        if collection.get_zorder() == 2
        for box in [path.get_extents() for path in collection.get_paths()]
    )


def numbers(found: Any) -> list[tuple[float, float, str]]:
    return sorted((*text.get_position(), text.get_text()) for text in found.axes[0].texts)


@pytest.mark.parametrize("name, ranks, microbatches", [("1f1b", 4, 8), ("zb-h1", 8, 32)])
def test_every_pass_has_a_box_and_a_number(name: str, ranks: int, microbatches: int) -> None:
    drawn = timeline(name, ranks, microbatches)
    found = figure(drawn, "title")
    spans = [(span, rank) for rank, row in enumerate(drawn.rows) for span in row]
    assert boxes(found) == sorted((span.start, span.end, rank) for span, rank in spans)
    expected = sorted(((span.start + span.end) / 2, rank, str(span.microbatch)) for span, rank in spans)
    assert numbers(found) == expected


@pytest.mark.parametrize("ranks, microbatches", [(8, 32), (1, 90)])  # the latter does not fit into the widest plot
def test_numbers_fit_into_their_boxes(ranks: int, microbatches: int) -> None:
    found = figure(timeline("1f1b", ranks, microbatches), "title")
    found.draw_without_rendering()
    for text in found.axes[0].texts:
        assert text.get_fontsize() >= 3.5
    assert len(found.axes[0].texts) == 2 * ranks * microbatches
    (left, _), (right, _) = found.axes[0].transData.transform([(0, 0), (1, 0)])
    lengths = {((begin + end) / 2, row): end - begin for begin, end, row in boxes(found)}
    for text in found.axes[0].texts:
        assert text.get_window_extent().width < lengths[text.get_position()] * (right - left)


def test_title_and_margins_show_idle_time_and_memory() -> None:
    found = figure(timeline("1f1b", 4, 8), "1f1b, 4 stages")
    assert found.axes[0].get_title(loc="left") == "1f1b, 4 stages: bubble 27.3%"
    beside = [label.get_text() for label in found.axes[0].child_axes[0].get_yticklabels()]
    assert beside == ["4 live, idle 27%", "3 live, idle 27%", "2 live, idle 27%", "1 live, idle 27%"]
    assert [label.get_text() for label in found.axes[0].get_yticklabels()] == [f"stage {n}" for n in range(4)]
    named = figure(timeline("1f1b", 2, 2), "", names=["one", "two"], unit="ms")
    assert [label.get_text() for label in named.axes[0].get_yticklabels()] == ["one", "two"]
    assert named.axes[0].get_xlabel() == "time (ms)"
    assert named.axes[0].child_axes[0].get_yticklabels()[0].get_text() == "2 live, idle 33%"


def legend(found: Any) -> list[str]:
    return [text.get_text() for text in found.legends[0].get_texts()]


def test_the_legend_names_the_kinds_that_occur() -> None:
    assert legend(figure(timeline("1f1b", 2, 2), "")) == ["forward", "backward", "idle"]
    assert legend(figure(timeline("zb-h1", 2, 2), "")) == ["forward", "input", "weight", "idle"]
    waits = Timeline(((TimelineSpan("forward", 0, 2), TimelineSpan("receive", 1, 1.5)),))
    assert legend(figure(waits, "")) == ["forward", "waiting for others", "idle"]
    assert legend(figure(timeline("interleaved", 2, 2, 2), ""))[0] == "forward (later chunks are lighter)"


def colours(found: Any) -> set[str]:
    from matplotlib.colors import to_hex

    return {to_hex(each.get_facecolor()[0]) for each in found.axes[0].collections if each.get_zorder() == 2}


def test_chunks_differ_in_shade() -> None:
    assert colours(figure(timeline("1f1b", 2, 2), "")) == {COLOURS["forward"], COLOURS["backward"]}
    assert len(colours(figure(timeline("interleaved", 2, 2, 3), ""))) == 6


def test_an_empty_timeline_gives_an_empty_plot() -> None:
    assert boxes(figure(Timeline(((), ())), "nothing")) == []
