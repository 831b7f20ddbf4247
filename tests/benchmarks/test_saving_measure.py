"""Turns of the candidates, without ranks: order of acts, timed part, and excluded candidates."""

from __future__ import annotations

import time
from typing import Any

import pytest
from saving.candidates import Candidate, WrongResult
from saving.measure import measure, one_turn, take_turns


class Alone:
    """Place of one rank that records its barriers."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.comm = self.world = self
        self.others: list[str] = []  # answers of rank 1, one per all-gather

    def Barrier(self) -> None:
        self.log.append("|")

    def quiet(self) -> None:
        self.log.append("quiet")

    def rest(self) -> None:
        self.log.append("rest")

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item, self.others.pop(0)] if self.others else [item]


@pytest.fixture
def place() -> Any:
    return Alone()


def candidate(place: Any, name: str, **options: Any) -> Candidate:
    parts: dict[str, Any] = {
        "call": lambda: place.log.append(name),
        "check": lambda: place.log.append("check") or "",
        "prepare": lambda: place.log.append("prepare"),
    }
    return Candidate(name, 100, **{**parts, **options})


def test_a_turn_is_prepared_before_and_checked_after_the_timed_call(place: Any) -> None:
    one_turn(place, candidate(place, "a"))
    assert place.log == ["prepare", "quiet", "|", "a", "rest", "check"]


def test_only_the_call_is_timed(place: Any) -> None:
    def slow() -> str:
        time.sleep(0.2)
        return ""

    turn = one_turn(place, candidate(place, "a", call=lambda: time.sleep(0.05), check=slow, prepare=slow))
    assert 0.05 <= turn.seconds < 0.2 and turn.problem == ""


def test_each_round_begins_with_the_next_candidate(place: Any) -> None:
    turns = take_turns(place, [candidate(place, name) for name in "abc"], 4)
    assert "".join(word for word in place.log if len(word) == 1).replace("|", "") == "abc" "bca" "cab" "abc"
    assert [len(each) for each in turns] == [4, 4, 4]


def test_the_first_round_does_not_count(place: Any) -> None:
    calls: list[float] = []

    def call() -> None:
        calls.append(0.2 if not calls else 0.0)
        time.sleep(calls[-1])

    (row,), unable = measure(place, "write", [candidate(place, "a", call=call)], 3)
    assert (len(calls), row.repeats, unable) == (4, 3, {})
    assert row.max < 0.2 and row.rate == pytest.approx(100 / row.median / 1e9)


def test_wrong_bytes_end_the_benchmark(place: Any) -> None:
    with pytest.raises(WrongResult, match=r"^a: model/b is not what was saved \(rank 0\)$"):
        one_turn(place, candidate(place, "a", check=lambda: "model/b is not what was saved"))
    place.others = ["", "step is wrong"]
    with pytest.raises(WrongResult, match=r"^a: step is wrong \(rank 1\)$"):
        one_turn(place, candidate(place, "a", call=lambda: None))


def test_a_failing_candidate_is_excluded_with_the_reason(place: Any) -> None:
    def fail() -> None:
        raise RuntimeError("no such\n  backend")

    able = candidate(place, "b")
    rows, unable = measure(place, "write", [candidate(place, "a", call=fail), able], 2)
    assert [row.candidate for row in rows] == ["b"]
    assert unable == {"a": "no such backend (rank 0)"}


def test_a_candidate_that_fails_on_one_rank_is_excluded_on_all(place: Any) -> None:
    place.others = ["disk full", "", ""]
    rows, unable = measure(place, "write", [candidate(place, "a"), candidate(place, "b")], 1)
    assert ([row.candidate for row in rows], unable) == (["b"], {"a": "disk full (rank 1)"})


def test_the_error_of_a_required_candidate_is_raised(place: Any) -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        measure(place, "write", [candidate(place, "a", call=fail, needed=True)], 1)


def test_a_later_failure_ends_the_benchmark(place: Any) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("worn out")

    with pytest.raises(WrongResult, match="a: worn out"):
        measure(place, "write", [candidate(place, "a", call=fail)], 1)
