"""Heartbeats in a page of node memory: one rank claims the report, and stalled ranks are known."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hpctrain.comm.transport.liveness import LINE, STALE, Heartbeat, HeartbeatRow


@pytest.fixture
def world() -> Iterator[Any]:
    """Return the ranks of this node, which are the whole world to the heartbeats."""
    from mpi4py import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED, MPI.COMM_WORLD.rank)
    yield node
    node.Free()


@pytest.mark.ranks
def test_the_ranks_of_this_machine_are_seen(comm: Any) -> None:
    names = comm.all_gather_object(socket.gethostname())
    seen = Heartbeat(comm.transport.comm).read_all()
    assert [row.rank for row in seen] == [rank for rank in range(comm.size) if names[rank] == names[comm.rank]]


@pytest.mark.ranks
def test_exactly_one_rank_claims_the_report(world: Any) -> None:
    heartbeat = Heartbeat(world)
    world.Barrier()
    assert world.allgather(heartbeat.claim(0.3)).count(True) == 1


@pytest.mark.ranks
def test_a_later_claim_loses(world: Any) -> None:
    heartbeat = Heartbeat(world)
    if world.rank == world.size - 1:
        won = heartbeat.claim(0.0)
        world.Barrier()
    else:
        world.Barrier()
        won = heartbeat.claim(0.0)
    assert world.allgather(won) == [False] * (world.size - 1) + [True]


@pytest.mark.ranks
def test_every_rank_sees_the_operations_of_the_others(world: Any) -> None:
    heartbeat = Heartbeat(world)
    heartbeat.beat("" if world.rank == 0 else "all_reduce", 2.5 * world.rank)
    world.Barrier()
    seen = heartbeat.read_all()
    assert [row.rank for row in seen] == list(range(world.size))
    assert [row.operation for row in seen] == [""] + ["all_reduce"] * (world.size - 1)
    assert [row.waited for row in seen] == pytest.approx([2.5 * rank for rank in range(world.size)])
    assert [row.late for row in seen] == [True] + [False] * (world.size - 1)
    assert str(seen[0]) == "rank 0 is in no collective" and str(seen[1]) == "rank 1 waits in all_reduce"
    world.Barrier()
    heartbeat.beat("broadcast", 0.0)
    world.Barrier()
    assert {row.operation for row in heartbeat.read_all()} == {"broadcast"}


@pytest.mark.ranks
def test_the_age_of_the_last_heartbeat_is_known(world: Any) -> None:
    heartbeat = Heartbeat(world)
    heartbeat.beat("barrier", 1.0)
    world.Barrier()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        if world.rank:
            heartbeat.beat("barrier", 1.0)
    assert heartbeat.read_all()[0].silent >= 0.3
    world.Barrier()


def test_a_rank_without_heartbeats_is_late() -> None:
    waiting, silent = HeartbeatRow(0, "barrier", 1.0, silent=0.1), HeartbeatRow(0, "barrier", 1.0, silent=STALE + 1)
    assert not waiting.late and str(waiting) == "rank 0 waits in barrier"
    assert silent.late and str(silent) == "rank 0 has not responded for 4 s"


@pytest.mark.ranks
def test_any_rank_can_request_stacks(world: Any) -> None:
    heartbeat = Heartbeat(world)
    assert not heartbeat.stacks_requested()
    world.Barrier()
    if world.rank == 1:
        heartbeat.request_stacks()
    world.Barrier()
    assert heartbeat.stacks_requested()


@pytest.mark.ranks
def test_a_long_name_does_not_overflow_its_line(world: Any) -> None:
    heartbeat = Heartbeat(world)
    heartbeat.beat("x" * 500, 0.0)
    world.Barrier()
    (found,) = {row.operation for row in heartbeat.read_all()}
    assert set(found) == {"x"} and LINE // 2 < len(found) < LINE
    assert not heartbeat.stacks_requested()
