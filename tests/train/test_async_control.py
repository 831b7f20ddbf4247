"""Ranks without step synchronization, and the step after which all of them stop or save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from hpctrain.train.async_control import AsyncExchange
from hpctrain.train.exchange import StepRequests

pytestmark = pytest.mark.ranks
STEPS = 20_000  # of microseconds each: far longer than a message to another node and back


@pytest.fixture
def exchange(own: Any) -> Iterator[Any]:
    exchange = AsyncExchange(own)
    yield exchange
    exchange.close()


@pytest.fixture
def own(comm: Any) -> Iterator[Any]:
    """Return a communicator of all ranks for one test."""
    own = comm.split(0)
    yield own
    own.free()


def walk(exchange: Any, rank: int, requests: dict[int, StepRequests], *, first: int = 1) -> tuple[list[int], int]:
    """Run steps, each rank at another pace, until a stop; return the steps that are saved, and the last one."""
    saved = []
    for step in range(first, STEPS):
        for _ in range(30 * rank):
            os.sched_yield()
        _, found = exchange({"loss": float(step)}, requests.get(step, StepRequests()), step)
        if found.save:
            saved.append(step)
            exchange._memory.barrier()
        if found.stop:
            return saved, step
    return saved, STEPS


@pytest.mark.parametrize("who", ["first", "last"])
def test_all_stop_after_the_same_step(own: Any, exchange: Any, who: str) -> None:
    requester = 0 if who == "first" else own.size - 1
    requests = {7: StepRequests(stop=True)} if own.rank == requester else {}
    _, last = walk(exchange, own.rank, requests)
    exchange._memory.barrier()
    everyone = own.all_gather_object(last)
    assert set(everyone) == {last} and 7 <= last < STEPS


def test_requests_of_several_ranks_are_served_in_turn(own: Any, exchange: Any) -> None:
    """A rank that saves waits for the others, as at a checkpoint."""
    requests = {own.rank + 2: StepRequests(save=True), 40: StepRequests(stop=True)}
    saved, last = walk(exchange, own.rank, requests)
    exchange._memory.barrier()
    everyone = own.all_gather_object((saved, last))
    assert set(map(str, everyone)) == {str((saved, last))}
    assert 1 <= len(saved) <= own.size and saved == sorted(saved) and 40 <= last < STEPS


def test_means_use_the_last_values_of_neighbours(own: Any, exchange: Any) -> None:
    exchange({"loss": float(own.rank), "rate": 2.0}, StepRequests(), 1)
    own.barrier()
    averages, found = exchange({"loss": float(own.rank), "rate": 2.0}, StepRequests(), 2)
    local_ranks = [rank for rank in range(own.size) if exchange._memory.view(rank) is not None]
    assert averages == {"loss": pytest.approx(sum(local_ranks) / len(local_ranks)), "rate": 2.0}
    assert not found.stop and not found.save
    own.barrier()
    averages, _ = exchange({f"loss of {own.rank}": 5.0}, StepRequests(), 3)
    assert averages == {f"loss of {own.rank}": 5.0}
