"""Timelines as text: the contents of the columns."""

from __future__ import annotations

import pytest

from hpctrain.parallel.pipeline.render import fitted, lines
from hpctrain.parallel.pipeline.schedules import make
from hpctrain.parallel.pipeline.timeline import Timeline, TimelineSpan, equal_costs, simulate


def drawn(name: str, ranks: int, microbatches: int, chunks: int = 1, width: int = 120, **times: float) -> list[str]:
    schedule = make(name, ranks, microbatches, chunks)
    return lines(simulate(schedule, equal_costs(schedule.chunks, **times)), width)


def test_a_column_has_the_length_of_the_shortest_pass() -> None:
    assert drawn("1f1b", 2, 2) == ["0: F0 F1 .  .  B0 -- .  B1 --", "1: .  F0 B0 -- F1 B1 -- .  ."]
    assert drawn("zb-h1", 2, 2, forward=2, backward=2) == [
        "0: F0 -- F1 -- .  I0 W0 .  I1 W1",
        "1: .  .  F0 -- I0 F1 -- I1 W0 W1",
    ]


def test_chunks_have_letters() -> None:
    assert drawn("interleaved", 1, 1, 2, backward=1) == ["0: F0a F0b B0b B0a"]


def test_wide_timelines_are_cut_into_blocks() -> None:
    assert drawn("1f1b", 2, 2, width=15) == [
        "0: F0 F1 .  .",
        "1: .  F0 B0 --",
        "",
        "0: B0 -- .  B1",
        "1: F1 B1 -- .",
        "",
        "0: --",
        "1: .",
    ]


def test_numbers_of_two_digits_keep_columns_aligned() -> None:
    text = drawn("gpipe", 2, 11, backward=1)
    assert text[0].index("F10") == text[1].index("F9") and text[0].index("B0") == text[1].index("B1")


def test_short_updates_do_not_stretch_the_text() -> None:
    assert drawn("pipedream", 1, 2, update=0.01) == ["0: F0 B0 -- F1 B1 --"]
    assert drawn("pipedream", 1, 2, update=1) == ["0: F0 B0 -- U0 F1 B1 --"]


def test_very_short_passes_do_not_make_the_text_too_wide() -> None:
    rows = ((TimelineSpan("forward", 0, 1e-6, 0, 0), TimelineSpan("backward", 1, 3, 0, 0)),)
    (line,) = lines(Timeline(rows), 10_000)
    assert len(line.split()) - 1 == 240 and line.split().count("--") > 100


def test_measured_timelines_fill_the_width() -> None:
    first = (
        TimelineSpan("forward", 0, 4, 0, 0),
        TimelineSpan("backward", 6.1, 15, 0, 0),
        TimelineSpan("optimizer", 15, 17),
    )
    second = (
        TimelineSpan("forward", 4, 6, 1, 0),
        TimelineSpan("backward", 6, 6.2, 1, 0),
        TimelineSpan("reduce", 6.2, 17),
    )
    assert fitted(Timeline((first, second)), 20) == ["0: F0- ..B0------ U", "1: ....F0..........."]


@pytest.mark.parametrize("rows", [(), ((),), ((TimelineSpan("data", 0, 1),),)])
def test_an_empty_timeline_gives_empty_lines(rows: tuple[tuple[TimelineSpan, ...], ...]) -> None:
    for draw in (lines, fitted):
        assert all(set(line) <= set("0: .") for line in draw(Timeline(rows)))
