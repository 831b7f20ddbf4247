"""Clock offsets between nodes, measured by messages with a known error bound."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.doctoring import only, told
from support.nodes import on_nodes, one_per_node

from hpctrain.doctor.preflight.messages import Skew, check_clocks, describe, measure_clocks


def test_large_offsets_are_a_finding() -> None:
    near, far = Skew(1, "n2", 0.5, 1e-3), Skew(2, "n3", -3.0, 1e-3)
    assert told(check_clocks([near])) == [] == list(check_clocks([]))
    assert only(check_clocks([near, far])).found == "n3 is 3 s (within 1 ms) behind the first node"
    assert told(check_clocks([Skew(1, "n2", 3.0, 2.5)])) == []  # the error bound of the messages is that large
    assert [finding.found for finding in check_clocks([Skew(1, "n2", 1e-5, 1e-4)])] == ["no difference seen"]


def test_offsets_are_described_in_words() -> None:
    assert describe(Skew(1, "n2", 0.0012, 1e-4)) == "1.2 ms (within 100 us) ahead of"


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
def test_without_time_there_is_no_measurement(apart: Any) -> None:
    assert measure_clocks(apart, ["n"] * apart.size, 0.0) == []


def test_one_node_has_one_clock(comm: Any) -> None:
    assert measure_clocks(comm, ["here"], 1.0) == []
