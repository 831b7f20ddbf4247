"""The race: who goes on, when the mark is reached, and when two runs had the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from racing.marks import Mark, Point, mark_of, reached
from racing.members import BY_NAME
from racing.names import DDP, DIGITS, EASGD, GPT, MEMBERS, SERVER, SILENT, TASKS, WORDS
from racing.race import Lane, alike, goes_on
from racing.task import FULL, SMALL

from hpctrain.errors import UsageError

SEGMENTS = 4


def lane(name: str, *accuracies: float) -> Lane:
    """Return what a member has done, 10 samples and a second a segment; the first is before all training."""
    points = [Point(10 * number, float(number), accuracy, 1.0) for number, accuracy in enumerate(accuracies)]
    return Lane(BY_NAME[name], points)


def test_mark_is_the_best_of_ddp_with_all_its_samples() -> None:
    assert mark_of(lane(DDP, 0.1, 0.9, 0.97, 0.95).points) == Mark(0.97, 30)


def test_mark_is_reached_by_the_first_point_that_is_close_enough() -> None:
    points = lane(SERVER, 0.1, 0.95, 0.961, 0.98).points
    assert reached(points, Mark(0.97, 30)) is points[2]
    assert reached(points, Mark(0.99, 30)) is points[3]
    assert reached(points, Mark(0.995, 30)) is None


def test_all_train_as_long_as_ddp_and_only_those_that_lag_go_on_up_to_twice_that() -> None:
    ddp = lane(DDP, 0.1, 0.5, 0.8, 0.9, 0.9)
    assert goes_on(lane(DDP, 0.1, 0.5, 0.8, 0.9), None, SEGMENTS) and not goes_on(ddp, ddp, SEGMENTS)
    early, late = (0.1, 0.9, 0.9, 0.9), (0.1, 0.2, 0.3, 0.4, 0.5)
    assert goes_on(lane(SERVER, *early), ddp, SEGMENTS)  # for the picture
    assert not goes_on(lane(SERVER, *early, 0.8), ddp, SEGMENTS)
    assert goes_on(lane(SERVER, *late), ddp, SEGMENTS) and not goes_on(lane(SERVER, *late), None, SEGMENTS)
    assert goes_on(lane(SERVER, *late, 0.5, 0.5, 0.6), ddp, SEGMENTS)
    assert not goes_on(lane(SERVER, *late, 0.5, 0.5, 0.6, 0.6), ddp, SEGMENTS)


def test_bits_are_alike_where_all_ranks_saw_the_same_as_far_as_both_runs_went() -> None:
    assert alike([(["a", "b", "c"], ["a", "b"]), (["a", "b", "d"], ["a", "b"])])
    assert not alike([(["a", "b", "c"], ["a", "x"]), (["a", "b", "c"], ["a", "x"])])  # another run, other bits
    assert not alike([(["a", "b"], ["a", "b"]), (["a", "x"], ["a", "x"])])  # another rank, another centre


def test_every_member_has_a_word_and_rates_and_every_turn_holds_whole_periods() -> None:
    assert list(WORDS.values()) == list(MEMBERS) and set(BY_NAME) == {*MEMBERS, SILENT}
    for one in BY_NAME.values():
        assert set(one.rates) == set(TASKS)
    for task in (*FULL.values(), *SMALL.values()):
        assert all(task.turn % BY_NAME[name].period == 0 for name in MEMBERS)
        for workers in (2, 4):
            trained = task.segments * task.steps(workers) * task.batch * workers
            assert abs(trained / task.samples - 1) < 0.15


def test_data_that_are_missing_are_named_with_what_makes_them(tmp_path: Path) -> None:
    for name, command in ((DIGITS, "make digits"), (GPT, "hpctrain data pack -o runs/gpt-tiny.h5")):
        with pytest.raises(UsageError, match=f"none.h5 is missing: {command} makes it"):
            replace(FULL[name], file=str(tmp_path / "none.h5")).dataset("train")


def test_the_rate_is_shared_by_those_who_update_the_same_parameters_and_rises_at_first() -> None:
    assert BY_NAME[SERVER].rate(GPT, 4) == BY_NAME[SERVER].rates[GPT] / 4
    assert BY_NAME[EASGD].rate(GPT, 4) == BY_NAME[EASGD].rates[GPT]
    assert FULL[GPT].warmup(2) * FULL[GPT].batch * 2 == FULL[GPT].samples / 10
