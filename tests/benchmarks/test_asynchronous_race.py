"""The race of the asynchronous benchmark: which members continue, when the mark is reached, which runs agree."""

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
    """Return the record of a member: 10 samples and 1 s per segment, where the first point precedes training."""
    points = [Point(10 * number, float(number), accuracy, 1.0) for number, accuracy in enumerate(accuracies)]
    return Lane(BY_NAME[name], points)


def test_mark_is_the_best_accuracy_of_ddp_and_all_its_samples() -> None:
    assert mark_of(lane(DDP, 0.1, 0.9, 0.97, 0.95).points) == Mark(0.97, 30)


def test_mark_is_reached_at_the_first_point_that_is_close_enough() -> None:
    points = lane(SERVER, 0.1, 0.95, 0.961, 0.98).points
    assert reached(points, Mark(0.97, 30)) is points[2]
    assert reached(points, Mark(0.99, 30)) is points[3]
    assert reached(points, Mark(0.995, 30)) is None


def test_members_train_as_long_as_ddp_and_those_behind_up_to_twice_as_long() -> None:
    ddp = lane(DDP, 0.1, 0.5, 0.8, 0.9, 0.9)
    assert goes_on(lane(DDP, 0.1, 0.5, 0.8, 0.9), None, SEGMENTS) and not goes_on(ddp, ddp, SEGMENTS)
    early, late = (0.1, 0.9, 0.9, 0.9), (0.1, 0.2, 0.3, 0.4, 0.5)
    assert goes_on(lane(SERVER, *early), ddp, SEGMENTS)  # for the plot
    assert not goes_on(lane(SERVER, *early, 0.8), ddp, SEGMENTS)
    assert goes_on(lane(SERVER, *late), ddp, SEGMENTS) and not goes_on(lane(SERVER, *late), None, SEGMENTS)
    assert goes_on(lane(SERVER, *late, 0.5, 0.5, 0.6), ddp, SEGMENTS)
    assert not goes_on(lane(SERVER, *late, 0.5, 0.5, 0.6, 0.6), ddp, SEGMENTS)


def test_runs_agree_if_all_ranks_have_equal_digests_up_to_the_shorter_run() -> None:
    assert alike([(["a", "b", "c"], ["a", "b"]), (["a", "b", "d"], ["a", "b"])])
    assert not alike([(["a", "b", "c"], ["a", "x"]), (["a", "b", "c"], ["a", "x"])])  # another run, other bits
    assert not alike([(["a", "b"], ["a", "b"]), (["a", "x"], ["a", "x"])])  # another rank, another centre


def test_every_member_has_a_name_and_rates_and_every_turn_is_whole_periods() -> None:
    assert list(WORDS.values()) == list(MEMBERS) and set(BY_NAME) == {*MEMBERS, SILENT}
    for one in BY_NAME.values():
        assert set(one.rates) == set(TASKS)
    for task in (*FULL.values(), *SMALL.values()):
        assert all(task.turn % BY_NAME[name].period == 0 for name in MEMBERS)
        for workers in (2, 4):
            trained = task.segments * task.steps(workers) * task.batch * workers
            assert abs(trained / task.samples - 1) < 0.15


def test_missing_data_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    for name, command in ((DIGITS, "make digits"), (GPT, "hpctrain data pack -o runs/gpt-tiny.h5")):
        with pytest.raises(UsageError, match=f"none.h5 is missing: {command} makes it"):
            replace(FULL[name], file=str(tmp_path / "none.h5")).dataset("train")


def test_the_rate_is_divided_by_workers_that_share_parameters_and_is_warmed_up() -> None:
    assert BY_NAME[SERVER].rate(GPT, 4) == BY_NAME[SERVER].rates[GPT] / 4
    assert BY_NAME[EASGD].rate(GPT, 4) == BY_NAME[EASGD].rates[GPT]
    assert FULL[GPT].warmup(2) * FULL[GPT].batch * 2 == FULL[GPT].samples / 10
