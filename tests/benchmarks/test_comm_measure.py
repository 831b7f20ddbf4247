"""Turns of the candidates, without ranks: order and number of the calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comm.candidates import Candidate
from comm.measure import take_turns
from harness import slowest


class Alone:
    """Place of one rank that records its barriers."""

    def __init__(self, log: list[str]) -> None:
        self.device = torch.device("cpu")
        self.world = self
        self.log = log

    def Barrier(self) -> None:
        self.log.append("|")


def turns(rounds: int, calls: int, **every: int) -> tuple[list[str], list[list[float]]]:
    log: list[str] = []
    place: Any = Alone(log)
    nothing = torch.empty(0)
    candidates = [
        Candidate(name, lambda name=name: log.append(name), [nothing], nothing, turn)  # type: ignore[misc]
        for name, turn in every.items()
    ]
    seconds = take_turns(place, candidates, rounds, calls)
    return log, seconds


def test_every_repeat_is_a_barrier_followed_by_the_calls() -> None:
    log, seconds = turns(1, 3, a=1)
    assert "".join(log) == "|aaa|aaa"  # the first repeat is the warm-up
    assert len(seconds[0]) == 1 and seconds[0][0] >= 0


def test_each_round_begins_with_the_next_candidate() -> None:
    log, seconds = turns(3, 1, a=1, b=1, c=1)
    assert "".join(log).replace("|", "") == "abc" "bca" "cab" "abc"
    assert [len(times) for times in seconds] == [3, 3, 3]


def test_slow_candidates_take_fewer_turns_but_at_least_one() -> None:
    for rounds, expected in ((1, 1), (3, 1), (4, 2), (8, 3), (40, 11)):
        _, (often, seldom) = turns(rounds, 1, a=1, b=4)
        assert (len(often), len(seldom)) == (rounds, expected)


def test_the_time_of_a_repeat_is_that_of_the_slowest_rank() -> None:
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.0]]) == [3.0, 5.0, 2.0]


@pytest.mark.parametrize("calls", [1, 10])
def test_the_figure_is_the_mean_of_the_calls(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 7))
    monkeypatch.setattr("comm.measure.time.perf_counter", lambda: float(next(clock)))
    _, (times,) = turns(2, calls, a=1)
    assert times == [7 / calls, 7 / calls]
