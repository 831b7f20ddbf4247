"""Bandwidth between pairs of ranks: each pair meets once, each rank has one partner per round; the messages sent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hpctrain.doctor.preflight.messages import Pair, measure_pairs, schedule, typical_bandwidth


@pytest.mark.parametrize("members", [*range(1, 18), 64, 101])
def test_schedule_pairs_all_members_once_and_one_partner_at_a_time(members: int) -> None:
    rounds = schedule(members)
    for meeting in rounds:
        playing = [member for pair in meeting for member in pair]
        assert len(playing) == len(set(playing)) == members - members % 2
    met = [pair for meeting in rounds for pair in meeting]
    assert sorted(met) == list(itertools.combinations(range(members), 2))
    assert len(rounds) == (members - 1 if members % 2 == 0 else members)


def test_reach_is_the_median_bandwidth_over_partners() -> None:
    pairs = [Pair(0, 1, 1.0, 10.0), Pair(0, 2, 1.0, 4.0), Pair(1, 2, 1.0, 6.0)]
    assert typical_bandwidth(pairs, 4) == {0: 7.0, 1: 8.0, 2: 5.0}


@pytest.mark.ranks
def test_all_pairs_are_measured(own: Any) -> None:
    with own.recording() as recorder:
        said: list[str] = []
        found = measure_pairs(own, 60.0, said.append)
    assert [(pair.first, pair.second) for pair in found.pairs] == list(itertools.combinations(range(own.size), 2))
    assert found.rounds == found.of_rounds == len(said) == len(schedule(own.size))
    assert all(0 < pair.latency < 1 and 1e5 < pair.bandwidth < 1e12 for pair in found.pairs)
    assert recorder.calls["send"] > 20 * (own.size - 1)
    assert own.broadcast_object(found) == found


@pytest.mark.ranks(3, 4)
def test_measurement_ends_after_a_whole_round(own: Any) -> None:
    found = measure_pairs(own, 0.0)
    assert (found.rounds, found.of_rounds) == (1, 3) and len(found.pairs) == own.size // 2
