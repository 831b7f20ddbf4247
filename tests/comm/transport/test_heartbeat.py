"""Heartbeats in a page of node memory: one rank claims the report, and stalled ranks are known."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hpctrain.comm.transport import liveness as module


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
    seen = module.Heartbeat(comm.transport.comm).read_all()
    assert [vital.rank for vital in seen] == [rank for rank in range(comm.size) if names[rank] == names[comm.rank]]


@pytest.mark.ranks
def test_exactly_one_rank_claims_the_report(world: Any) -> None:
    vitals = module.Heartbeat(world)
    world.Barrier()
    assert world.allgather(vitals.claim(0.3)).count(True) == 1


@pytest.mark.ranks
def test_a_later_claim_loses(world: Any) -> None:
    vitals = module.Heartbeat(world)
    if world.rank == world.size - 1:
        won = vitals.claim(0.0)
        world.Barrier()
    else:
        world.Barrier()
        won = vitals.claim(0.0)
    assert world.allgather(won) == [False] * (world.size - 1) + [True]


@pytest.mark.ranks
def test_every_rank_sees_the_operations_of_the_others(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vitals = module.Heartbeat(world)
    vitals.beat("" if world.rank == 0 else "all_reduce", 2.5 * world.rank)
    world.Barrier()
    seen = vitals.read_all()
    assert [vital.rank for vital in seen] == list(range(world.size))
    assert [vital.operation for vital in seen] == [""] + ["all_reduce"] * (world.size - 1)
    assert [vital.waited for vital in seen] == pytest.approx([2.5 * rank for rank in range(world.size)])
    assert [vital.late for vital in seen] == [True] + [False] * (world.size - 1)
    assert str(seen[0]) == "rank 0 is in no collective" and str(seen[1]) == "rank 1 waits in all_reduce"
    world.Barrier()
    vitals.beat("broadcast", 0.0)
    world.Barrier()
    assert {vital.operation for vital in vitals.read_all()} == {"broadcast"}


@pytest.mark.ranks
def test_a_rank_without_heartbeats_is_late(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE", 0.2)
    vitals = module.Heartbeat(world)
    vitals.beat("barrier", 1.0)
    world.Barrier()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        if world.rank:
            vitals.beat("barrier", 1.0)
    assert vitals.read_all()[0].late and "rank 0 has not responded" in str(vitals.read_all()[0])
    world.Barrier()


@pytest.mark.ranks
def test_any_rank_can_request_stacks(world: Any) -> None:
    vitals = module.Heartbeat(world)
    assert not vitals.stacks_requested()
    world.Barrier()
    if world.rank == 1:
        vitals.request_stacks()
    world.Barrier()
    assert vitals.stacks_requested()


@pytest.mark.ranks
def test_a_long_name_does_not_overflow_its_line(world: Any) -> None:
    vitals = module.Heartbeat(world)
    vitals.beat("x" * 500, 0.0)
    world.Barrier()
    assert {vital.operation for vital in vitals.read_all()} == {"x" * (module._NAME_BYTES - 1)}
    assert not vitals.stacks_requested()
