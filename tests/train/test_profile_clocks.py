"""Clock offsets between nodes, without messages on one node."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hpctrain.train.profile.record import clock_offsets


@pytest.mark.ranks
def test_ranks_of_one_node_share_a_clock(comm: Any) -> None:
    if comm.nodes > 1:
        assert len(set(clock_offsets(comm))) <= comm.nodes
        return
    with comm.transport.recording() as sent:
        assert clock_offsets(comm, clock=lambda: comm.rank * 1000.0) == [0.0] * comm.size
    assert not sent.calls["send"] and not sent.calls["isend"]


@pytest.mark.ranks
def test_clock_offsets_are_measured(comm: Any) -> None:
    """Each rank simulates a node whose clock is 1000 s ahead per rank; an answer takes far less than the tolerance."""
    nodes = list(range(comm.size))
    found = clock_offsets(comm, clock=lambda: time.monotonic() + 1000.0 * comm.rank, nodes=nodes)
    base = comm.all_gather_object(time.monotonic())
    assert max(base) - min(base) < 100 or comm.nodes > 1
    assert found == pytest.approx([1000.0 * rank for rank in nodes], abs=1.0)
    assert comm.all_gather_object(found) == [found] * comm.size


@pytest.mark.ranks(3, 4)
def test_ranks_use_the_clock_of_the_first_rank_of_their_node(comm: Any) -> None:
    nodes = [0, *([1] * (comm.size - 1))]
    found = clock_offsets(comm, clock=lambda: time.monotonic() + 1000.0 * comm.rank, nodes=nodes)
    assert found[0] == 0 and found[1] == pytest.approx(1000, abs=1.0) and set(found[1:]) == {found[1]}
