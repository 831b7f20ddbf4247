"""Figures of the asynchronous benchmark: members that continue, costs of exchanges, throughput, targets, pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asynchronous import draw, histograms, targets
from asynchronous_members import BY_NAME, DIGITS, FULL, GPT, RATES, SILENT, SMALL, TASKS, Name
from asynchronous_timing import Point, Record, alike, costs, goes_on, pace, reached, target_of
from benchmark_helpers import texts_of

from hpctrain.errors import UsageError

SEGMENTS = 4


def record(name: str, *accuracies: float) -> Record:
    """Return the record of a member: 10 samples and 1 s per segment, where the first point precedes training."""
    points = [Point(10 * number, float(number), accuracy, 1.0) for number, accuracy in enumerate(accuracies)]
    return Record(BY_NAME[name], points)


def mark(accuracy: float) -> dict[str, Any]:
    return {"accuracy": accuracy, "samples": 30}


def test_target_is_the_best_accuracy_of_ddp_and_all_its_samples() -> None:
    assert target_of(record(Name.DDP, 0.1, 0.9, 0.97, 0.95).points) == mark(0.97)


def test_target_is_reached_at_the_first_point_that_is_close_enough() -> None:
    points = record(Name.SERVER, 0.1, 0.95, 0.961, 0.98).points
    assert reached(points, mark(0.97)) is points[2]
    assert reached(points, mark(0.99)) is points[3]
    assert reached(points, mark(0.995)) is None


def test_members_train_as_long_as_ddp_and_those_behind_up_to_twice_as_long() -> None:
    ddp = record(Name.DDP, 0.1, 0.5, 0.8, 0.9, 0.9)
    assert goes_on(record(Name.DDP, 0.1, 0.5, 0.8, 0.9), None, SEGMENTS) and not goes_on(ddp, ddp, SEGMENTS)
    early, late = (0.1, 0.9, 0.9, 0.9), (0.1, 0.2, 0.3, 0.4, 0.5)
    assert goes_on(record(Name.SERVER, *early), ddp, SEGMENTS)  # for the plot
    assert not goes_on(record(Name.SERVER, *early, 0.8), ddp, SEGMENTS)
    assert goes_on(record(Name.SERVER, *late), ddp, SEGMENTS) and not goes_on(
        record(Name.SERVER, *late), None, SEGMENTS
    )
    assert goes_on(record(Name.SERVER, *late, 0.5, 0.5, 0.6), ddp, SEGMENTS)
    assert not goes_on(record(Name.SERVER, *late, 0.5, 0.5, 0.6, 0.6), ddp, SEGMENTS)


def test_runs_agree_if_all_ranks_have_equal_digests_up_to_the_shorter_run() -> None:
    assert alike([(["a", "b", "c"], ["a", "b"]), (["a", "b", "d"], ["a", "b"])])
    assert not alike([(["a", "b", "c"], ["a", "x"]), (["a", "b", "c"], ["a", "x"])])  # another run, other bits
    assert not alike([(["a", "b"], ["a", "b"]), (["a", "x"], ["a", "x"])])  # another rank, another centre


def test_every_member_has_a_name_and_rates_and_every_turn_is_whole_periods() -> None:
    assert set(BY_NAME) == {*Name, SILENT}
    assert set(RATES) == set(TASKS)
    for task in (*FULL.values(), *SMALL.values()):
        assert all(task.turn % BY_NAME[name].period == 0 for name in Name)
        for workers in (2, 4):
            trained = task.segments * task.steps(workers) * task.batch * workers
            assert abs(trained / task.samples - 1) < 0.15


def test_missing_data_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    for name, command in ((DIGITS, "make digits"), (GPT, "hpctrain data pack -o runs/gpt-tiny.h5")):
        with pytest.raises(UsageError, match=f"none.h5 is missing: {command} makes it"):
            replace(FULL[name], file=str(tmp_path / "none.h5")).dataset("train")


def test_the_rate_is_divided_by_workers_that_share_parameters_and_is_warmed_up() -> None:
    assert BY_NAME[Name.SERVER].rate(GPT, 4) == RATES[GPT] / 4
    assert BY_NAME[Name.EASGD].rate(GPT, 4) == RATES[GPT]
    assert FULL[GPT].warmup(2) * FULL[GPT].batch * 2 == FULL[GPT].samples / 10


def test_an_exchange_costs_the_extra_time_of_a_step_in_the_same_round() -> None:
    silent = [(step, None) for step in (1.0, 2.0, 1.0)]
    every = list(zip((1.25, 2.5, 1.1), (0.4, 0.1, 0.2)))
    fourth = [(step, None) for step in (1.0, 2.5, 1.1)]
    found = costs({SILENT: silent, Name.EASGD: every, Name.EASGD_4: fourth})
    assert found[Name.EASGD]["share"] == pytest.approx(0.2)  # of 0.2, 0.2 and 0.09
    assert found[Name.EASGD]["exchange"] == pytest.approx(0.25)  # of 0.25, 0.5 and 0.1
    assert found[Name.EASGD]["inside"] == pytest.approx(0.25)  # of 0.5, 0.25 and 0.22
    assert found[Name.EASGD]["step"]["median"] == 1.25 and found[Name.EASGD_4]["inside"] is None
    assert found[Name.EASGD_4]["exchange"] == pytest.approx(4 * 0.1)  # in every fourth step
    assert (found[SILENT]["share"], found[SILENT]["exchange"]) == (0, None)


def test_the_pace_of_all_workers_is_that_of_the_slowest_rank_of_each_round() -> None:
    found = pace(10, [1.0, 2.0, 1.0], [[1.0, 2.0, 1.0], [1.25, 2.0, 2.0]])
    assert found["alone"] == 10 and found["together"] == pytest.approx(10)  # of 16, 10 and 10
    assert found["times"] == pytest.approx(1.6)  # of 1.6, 2 and 1: in the same round


def result(**found: Any) -> dict[str, Any]:
    return {"digits": found}


def met(ranks: int, tasks: dict[str, Any]) -> list[tuple[float, bool]]:
    return [(one.value, one.met) for one in targets(ranks, tasks)]


def test_members_count_if_they_reach_ddps_accuracy_within_twice_its_samples() -> None:
    members = {
        Name.DDP: {"samples_over_ddp": 0.9},
        Name.SERVER: {"samples_over_ddp": 2.0},
        Name.EASGD: {"samples_over_ddp": 1.0},
    }
    raced = result(mark={"accuracy": 0.98, "samples": 10}, members=members)
    assert met(2, raced) == [(2, True)]
    members[Name.EASGD] = {"samples_over_ddp": None}
    assert met(2, raced) == [(1, False)]
    del raced["digits"]["mark"]
    assert met(2, raced) == []


@pytest.mark.parametrize("alike", [True, False])
def test_a_rerun_must_give_the_same_bits(alike: bool) -> None:
    assert met(2, result(same_bits={"alike": alike, "samples": 10})) == [(int(not alike), alike)]


def test_exchanges_have_targets_for_the_step_and_for_turns_on_four_ranks() -> None:
    found = result(
        exchange={Name.EASGD: {"share": 0.05, "exchange": 0.001}, Name.EASGD_TURNS: {"share": 0.3, "exchange": 0.006}}
    )
    assert met(2, found) == [(0.05, True), (0.05, False)]
    assert met(4, found)[2] == (pytest.approx(6), True)
    found["digits"]["exchange"][Name.EASGD]["exchange"] = -0.001  # nothing was measured
    assert met(4, found)[2] == (pytest.approx(600), True)


def test_throughput_has_a_target_on_two_ranks() -> None:
    found = result(pace={SILENT: {"times": 1.9}, Name.SERVER: {"times": 1.85}, Name.HOGWILD: {"times": 1.7}})
    assert met(2, found) == [(1.85, True), (1.7, False)]
    assert met(4, found) == []


def member(*bars: int) -> dict[str, Any]:
    points = [
        {"samples": 10 * number, "seconds": number / 2, "accuracy": accuracy, "loss": 1 - accuracy}
        for number, accuracy in enumerate((0.1, 0.8, 0.95))
    ]
    return {"points": points, "best_accuracy": 0.95, "staleness_histogram": list(bars)}


def test_curves_and_histograms_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stale = {name: member(3, 1) if name in (Name.SERVER, Name.HOGWILD) else member() for name in Name}
    mark = {"accuracy": 0.95, "samples": 20}
    result: dict[str, Any] = {
        "ranks": 2,
        "tasks": {DIGITS: {"members": stale, "mark": mark}, GPT: {"members": {Name.DDP: member()}}},
    }
    files = draw(result, tmp_path / "asynchronous-np2")
    names = [f"asynchronous-np2-{what}.{kind}" for what in (DIGITS, GPT, "staleness") for kind in ("png", "svg")]
    assert [file.name for file in files] == names and all(file.stat().st_size for file in files)
    digits = texts_of(files[1]).splitlines()
    assert {*Name, "seconds of training", "a point below ddp's best", "convnet on digits, 2 workers"} <= set(digits)
    assert (
        Name.EASGD not in texts_of(files[3]).splitlines()
        and "a point below ddp's best" not in texts_of(files[3]).splitlines()
    )
    bars = texts_of(files[5]).splitlines()
    assert (
        {Name.SERVER, Name.HOGWILD, "staleness, 2 workers"} <= set(bars) and Name.EASGD not in bars and GPT not in bars
    )


def test_histograms_show_shares_of_the_counted_updates() -> None:
    assert histograms({Name.DDP: member(), Name.SERVER: member(3, 0, 1)}) == {Name.SERVER: [0.75, 0.0, 0.25]}


def test_timings_alone_give_no_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw({"ranks": 2, "tasks": {DIGITS: {"exchange": {}}}}, tmp_path / "asynchronous-np2") == []
