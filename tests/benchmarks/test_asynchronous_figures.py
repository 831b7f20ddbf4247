"""Figures of the asynchronous benchmark: costs of exchanges, throughput, and comparison with the targets."""

from __future__ import annotations

from typing import Any

import pytest
from racing.exchange import Turns, costs
from racing.names import DDP, EASGD, EASGD_PERIOD, HOGWILD, ROUND_ROBIN, SERVER, SILENT
from racing.pace import pace
from racing.targets import targets


def test_an_exchange_costs_the_extra_time_of_a_step_in_the_same_round() -> None:
    silent, every, fourth = Turns([1.0, 2.0, 1.0]), Turns([1.25, 2.5, 1.1], [0.4, 0.1, 0.2]), Turns([1.0, 2.5, 1.1])
    found = costs({SILENT: silent, EASGD: every, EASGD_PERIOD: fourth})
    assert found[EASGD].share == pytest.approx(0.2)  # of 0.2, 0.2 and 0.09
    assert found[EASGD].exchange == pytest.approx(0.25)  # of 0.25, 0.5 and 0.1
    assert found[EASGD].inside == pytest.approx(0.25)  # of 0.5, 0.25 and 0.22
    assert found[EASGD].step["median"] == 1.25 and found[EASGD_PERIOD].inside is None
    assert found[EASGD_PERIOD].exchange == pytest.approx(4 * 0.1)  # in every fourth step
    assert (found[SILENT].share, found[SILENT].exchange) == (0, None)


def test_the_pace_of_all_workers_is_that_of_the_slowest_rank_of_each_round() -> None:
    found = pace(10, [1.0, 2.0, 1.0], [[1.0, 2.0, 1.0], [1.25, 2.0, 2.0]])
    assert found.alone == 10 and found.together == pytest.approx(10)  # of 16, 10 and 10
    assert found.times == pytest.approx(1.6)  # of 1.6, 2 and 1: in the same round


def result(**found: Any) -> dict[str, Any]:
    return {"digits": found}


def met(ranks: int, tasks: dict[str, Any]) -> list[tuple[float, bool]]:
    return [(one.value, one.met) for one in targets(ranks, tasks)]


def test_members_count_if_they_reach_ddps_accuracy_within_twice_its_samples() -> None:
    members = {DDP: {"samples_over_ddp": 0.9}, SERVER: {"samples_over_ddp": 2.0}, EASGD: {"samples_over_ddp": 1.0}}
    raced = result(mark={"accuracy": 0.98, "samples": 10}, members=members)
    assert met(2, raced) == [(2, True)]
    members[EASGD] = {"samples_over_ddp": None}
    assert met(2, raced) == [(1, False)]
    del raced["digits"]["mark"]
    assert met(2, raced) == []


@pytest.mark.parametrize("alike", [True, False])
def test_a_rerun_must_give_the_same_bits(alike: bool) -> None:
    assert met(2, result(same_bits={"alike": alike, "samples": 10})) == [(int(not alike), alike)]


def test_exchanges_have_targets_for_the_step_and_for_turns_on_four_ranks() -> None:
    found = result(exchange={EASGD: {"share": 0.05, "exchange": 0.001}, ROUND_ROBIN: {"share": 0.3, "exchange": 0.006}})
    assert met(2, found) == [(0.05, True), (0.05, False)]
    assert met(4, found)[2] == (pytest.approx(6), True)
    found["digits"]["exchange"][EASGD]["exchange"] = -0.001  # nothing was measured
    assert met(4, found)[2] == (pytest.approx(600), True)


def test_throughput_has_a_target_on_two_ranks() -> None:
    found = result(pace={SILENT: {"times": 1.9}, SERVER: {"times": 1.85}, HOGWILD: {"times": 1.7}})
    assert met(2, found) == [(1.85, True), (1.7, False)]
    assert met(4, found) == []
