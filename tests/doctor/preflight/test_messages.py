"""Measurements by messages: clock offsets, rates of pairs, all_reduce."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.doctoring import only, told
from support.nodes import on_nodes, one_per_node
from support.pace import scaled

from hpctrain.doctor.preflight.messages import (
    SIZES,
    Pair,
    ReductionCheck,
    Skew,
    check_clocks,
    check_reductions,
    measure_clocks,
    measure_pairs,
    measure_reductions,
    schedule,
    typical_bandwidth,
)


def test_large_offsets_are_a_finding() -> None:
    near, far = Skew(1, "n2", 0.5, 1e-3), Skew(2, "n3", -3.0, 1e-3)
    assert told(check_clocks([near])) == [] == list(check_clocks([]))
    assert only(check_clocks([near, far])).found == "n3 is 3 s (within 1 ms) behind the first node"
    (usual,) = check_clocks([Skew(1, "n2", 0.0012, 1e-4)])
    assert usual.found == "n2 is furthest off, 1.2 ms (within 100 us) ahead of the first node"
    assert told(check_clocks([Skew(1, "n2", 3.0, 2.5)])) == []  # the error bound of the messages is that large
    assert [finding.found for finding in check_clocks([Skew(1, "n2", 1e-5, 1e-4)])] == ["no difference seen"]


@pytest.fixture
def apart(comm: Any) -> Iterator[Any]:
    own = on_nodes(comm, one_per_node)
    yield own
    own.free()


@pytest.mark.ranks
def test_a_clock_that_is_ahead_is_measured(apart: Any) -> None:
    """Each rank represents a node, whose clock is ``rank`` hours ahead."""
    hosts = [f"n{rank}" for rank in range(apart.size)]
    skews = measure_clocks(apart, hosts, 5.0, lambda: time.time() + 3600 * apart.rank)
    assert [skew.host for skew in skews] == hosts[1:]
    assert all(abs(skew.seconds - 3600 * skew.node) < skew.within + 0.01 for skew in skews)


@pytest.mark.ranks
def test_without_time_or_other_nodes_there_is_no_measurement(apart: Any, comm: Any) -> None:
    assert measure_clocks(apart, ["n"] * apart.size, 0.0) == []
    node = comm.split(comm.node)
    assert measure_clocks(node, ["here"], 1.0) == []
    node.free()


# Bandwidth between pairs of ranks: each pair meets once, each rank has one partner per round; the messages sent -------


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


# Measurement of all_reduce, and the error for a wrong sum -------------------------------------------------------------


CPU = torch.device("cpu")


def test_wrong_sums_and_times_are_findings() -> None:
    right, wrong = ReductionCheck(2**20, 2e-3, (), 4), ReductionCheck(2**12, 1e-5, (1, 3), 4)
    assert told(check_reductions([wrong, right])) == [("error", "all_reduce")]
    assert only(check_reductions([wrong])).found == "a wrong sum on 2 ranks, 1 the first"
    assert [finding.found for finding in check_reductions([right])] == ["correct on all ranks; 1 MiB in 2 ms"]
    assert list(check_reductions([])) == []
    assert ReductionCheck(1000, 0.5, (), 4).bus == 2 * 3 / 4 * 1000 / 0.5  # of a ring


@pytest.mark.ranks
def test_sizes_are_measured_as_time_allows(own: Any) -> None:
    found = measure_reductions(own, CPU, 2.0)
    assert [one.nbytes for one in found] == list(SIZES[: len(found)]) and len(found) >= 2
    assert all(one.wrong == () and one.size == own.size and 0 < one.seconds < scaled(1) for one in found)
    # Two small sizes are always measured; they predict that the large one would take too long.
    assert [one.nbytes for one in measure_reductions(own, CPU, 1e-9)] == [*SIZES[:2]]


class Faulty:
    """A communicator whose last rank gets a wrong sum."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def split(self, colour: int) -> Faulty:
        return Faulty(self._comm.split(colour))

    def all_reduce(self, tensor: Any) -> None:
        self._comm.all_reduce(tensor)
        if self._comm.rank == self._comm.size - 1:
            tensor[3] += 1


@pytest.mark.ranks
def test_a_wrong_sum_is_detected(own: Any) -> None:
    found = measure_reductions(Faulty(own), CPU, 1e-9)  # type: ignore[arg-type]
    assert [one.wrong for one in found] == [(own.size - 1,)] * 2
