"""Staleness of every update, and share of communication, compared with scripted orders counted by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.asynchronous_fixtures import make_worker, passes

from hpctrain.errors import DeadlineError
from hpctrain.parallel.asynchronous.staleness import CommunicationTime, StalenessHistogram, bars

MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "server": ("server", {}),
    "locked": ("server", {"lock": True, "max_staleness": 50}),
    "hogwild": ("hogwild", {}),
    "asynchronous": ("easgd", {"mode": "asynchronous"}),
}


def scripted(workers: int, events: int) -> list[int]:
    """Return an order of workers, each of which alternately reads and updates."""
    chance = np.random.default_rng(workers)
    weights = np.arange(1.0, workers + 1)  # some are faster
    return chance.choice(workers, events, p=weights / weights.sum()).tolist()  # type: ignore[no-any-return]


def counted(script: list[int], *, reads: bool) -> Counter[int]:
    """Count staleness by hand; without ``reads`` it is counted from a worker's own previous update."""
    moves, seen, found = 0, dict[int, int](), Counter[int]()
    for worker in script:
        if reads and worker not in seen:
            seen[worker] = moves
            continue
        found[moves - seen.pop(worker, 0)] += 1
        moves += 1
        if not reads:
            seen[worker] = moves
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("member", MEMBERS)
def test_every_update_is_recorded_with_its_staleness(own: Any, member: str) -> None:
    data, server = MEMBERS[member]
    strategy, optimizer = make_worker(own, data, **server)
    script, read = scripted(own.size, 24), False
    for worker in script:
        if worker == own.rank:
            if data == "easgd" or not read:
                passes(strategy)
            if data == "easgd" or read:
                optimizer.step()
                optimizer.zero_grad()
            read = not read
        strategy.drain()
    expected = counted(script, reads=data != "easgd")
    figures = strategy.metrics()
    assert figures["staleness_histogram"] == [expected[one] for one in range(max(expected) + 1)]
    assert figures["staleness_most"] == max(expected) and (max(expected) > 1 or own.size == 1)
    mean = sum(one * count for one, count in expected.items()) / sum(expected.values())
    assert figures["staleness"] == pytest.approx(mean)
    assert strategy.metrics()["staleness_histogram"] == []  # each update is reported once
    strategy.detach()


@pytest.mark.ranks
def test_round_robin_has_one_update_of_each_other_worker_in_between(own: Any) -> None:
    strategy, optimizer = make_worker(own, "easgd", mode="round-robin")
    for _ in range(3):
        passes(strategy)
        optimizer.step()
    found = [1] * own.size  # before the first exchange of each
    found[own.size - 1] += 2 * own.size
    assert strategy.metrics()["staleness_histogram"] == found
    strategy.detach()


@pytest.mark.ranks
def test_a_step_without_gradients_is_not_an_update(own: Any) -> None:
    for data in ("server", "hogwild"):
        strategy, optimizer = make_worker(own, data)
        passes(strategy)
        strategy.gradients.drop()
        optimizer.step()
        strategy.drain()
        figures = strategy.metrics()
        assert (figures["staleness_histogram"], figures["staleness_most"]) == ([], 0)
        strategy.detach()


@pytest.mark.ranks(2, 3)
def test_a_timeout_at_the_staleness_bound_names_the_slow_rank(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has read and makes no update, like a stopped process."""
    strategy, optimizer = make_worker(own, "server", max_staleness=own.size - 1)
    if own.rank == 0:
        passes(strategy)
    strategy.drain()
    if own.rank == 1:
        monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.3")
        match = rf"at the staleness bound \({own.size - 1} updates\): rank 0 has read and made no update within 0.3"
        with pytest.raises(DeadlineError, match=match):
            for _ in range(own.size):
                passes(strategy)
                optimizer.step()
        monkeypatch.delenv("HPCTRAIN_TIMEOUT")
        strategy.gradients.drop()
        optimizer.step()  # makes no update from what this worker has read
    strategy.drain()
    strategy.detach()


@pytest.mark.ranks(2, 3)
def test_the_holder_of_a_lock_is_named(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 stops during an update, while it holds the lock; without a lock it delays no other rank."""
    strategy, optimizer = make_worker(own, "server", lock=True)
    free, other = make_worker(own, "server")
    passes(strategy)
    passes(free)
    with strategy.store.lock.of(0) if own.rank == 0 else torch.no_grad():
        strategy.drain()
        if own.rank == 1:
            monkeypatch.setenv("HPCTRAIN_TIMEOUT", "0.3")
            other.step()
            with pytest.raises(DeadlineError, match="the lock of rank 0's memory: timed out after .* held by rank 0"):
                optimizer.step()
            monkeypatch.delenv("HPCTRAIN_TIMEOUT")
        strategy.drain()
    free.detach()
    strategy.detach()


# The share of communication -------------------------------------------------------------------------------------------


def slowed(clock: list[float], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that takes two seconds of the clock."""

    def slow(*arguments: Any, **more: Any) -> Any:
        clock[0] += 2
        return call(*arguments, **more)

    return slow


SHARING: dict[str, tuple[str, dict[str, Any], Any]] = {  # with the communicating call that takes time
    "server": ("server", {}, lambda strategy: (strategy.store, "read")),
    "synchronous server": ("server", {"mode": "synchronous"}, lambda strategy: (strategy.comm, "all_reduce")),
    "hogwild": ("hogwild", {}, lambda strategy: (strategy.memory, "fetch_add")),
    "easgd": ("easgd", {}, lambda strategy: (strategy.comm, "all_reduce")),
    "local sgd": ("easgd", {"average": True}, lambda strategy: (strategy.comm, "all_reduce")),
    "asynchronous": ("easgd", {"mode": "asynchronous"}, lambda strategy: (strategy.memory, "add")),
    "round-robin": ("easgd", {"mode": "round-robin"}, lambda strategy: (strategy.memory, "add")),
}


@pytest.mark.ranks
@pytest.mark.parametrize("member", SHARING)
def test_the_share_counts_communication_within_steps(own: Any, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, server, what = SHARING[member]
    strategy, optimizer = make_worker(own, data, **server)
    clock = [1000.0]
    strategy.exchanging.clock = lambda: clock[0]
    owner, name = what(strategy)
    monkeypatch.setattr(owner, name, slowed(clock, getattr(owner, name)))
    started = 0.0
    for step in range(4):
        passes(strategy)
        clock[0] += 5  # time of a pass
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            strategy.drain()
            strategy.metrics()  # some calls occur once per run
            started = clock[0]
        elif step == 2:
            before = clock[0]
            with strategy.consensus_view():
                clock[0] += 1000
            started += clock[0] - before  # also what the view itself communicates
    passed = clock[0] - started
    assert strategy.metrics()["communication"] == pytest.approx((passed - 15) / passed) and passed > 15
    strategy.detach()


@pytest.mark.ranks(2, 3, 4)
def test_ranks_that_only_hold_parameters_have_no_share(own: Any) -> None:
    strategy, optimizer = make_worker(own, "server", ranks=1)
    clock = [1000.0]
    strategy.exchanging.clock = lambda: clock[0]
    if strategy.computes:
        passes(strategy)
        with strategy.exchanging:
            clock[0] += 3
        clock[0] += 1
        optimizer.step()
    strategy.drain()
    assert strategy.metrics()["communication"] == 0.75
    strategy.detach()


# In one process -------------------------------------------------------------------------------------------------------


def test_the_last_bar_counts_all_larger_staleness(comm: Any) -> None:
    assert bars(Counter()) == [] and bars(Counter({0: 2, 3: 1})) == [2, 0, 0, 1]
    assert bars(Counter({1: 4, 2: 1, 900: 5}), most=3) == [0, 4, 6]
    if comm.size == 1:
        record = StalenessHistogram()
        for staleness in (0, 900, 0):
            record.record(staleness)
        assert record.metrics(comm) == {
            "staleness": 300.0,
            "staleness_most": 900.0,
            "staleness_histogram": [2, *[0] * 98, 1],
        }


def test_time_between_steps_counts_and_pauses_do_not(comm: Any) -> None:
    exchanging, clock = CommunicationTime(), [1000.0]
    exchanging.clock = lambda: clock[0]
    assert exchanging.metrics(comm) == {"communication": 0.0}
    for _ in range(2):
        exchanging.begin_step()
        with exchanging:
            clock[0] += 1
        clock[0] += 3
    exchanging.pause()
    clock[0] += 100
    exchanging.begin_step()
    clock[0] += 2
    assert exchanging.metrics(comm) == {"communication": 0.2}
    clock[0] += 100
    exchanging.begin_step()
    clock[0] += 2
    assert exchanging.metrics(comm) == {"communication": 0.0}
