"""Warnings about stalled ranks: once per stall, by the first rank that is not stalled; none about slow ranks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from hpctrain.log import logger
from hpctrain.train.async_control import StragglerDetector


class Node:
    """Simulated node: ranks, a clock, and the messages of the ranks."""

    def __init__(self, size: int, said: list[str]) -> None:
        self.now, self.meetings, self.said = 100.0, 0, said
        self.steps = [1] * size
        self.ranks = [
            StragglerDetector(rank, range(size), self.steps.__getitem__, lambda: self.meetings, lambda: self.now)
            for rank in range(size)
        ]

    def go_on(self, ranks: list[int], steps: int, seconds: float) -> list[str]:
        """Let ``ranks`` run steps of ``seconds`` in parallel; return the messages of that time."""
        before = len(self.said)
        for _ in range(steps):
            self.now += seconds
            for rank in ranks:
                self.steps[rank] += 1
            for rank in ranks:
                self.ranks[rank].look(self.steps[rank])
        return self.said[before:]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Return a node of three ranks, with a deadline of 100 s: a rank without a step for 10 s is stalled."""
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "100")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield Node(3, said)
    logger.removeHandler(handler)


def test_a_stall_is_reported_once_and_its_end_as_well(node: Node) -> None:
    assert node.go_on([0, 1, 2], 50, 0.4) == []
    assert node.go_on([0, 1], 25, 0.4) == []  # ten seconds since the last check are not over
    (line,) = node.go_on([0, 1], 100, 0.4)
    assert re.fullmatch(r"rank 2 has made no step for 1[01]\.\d s, other ranks continue: it is in step 51", line)
    (line,) = node.go_on([0, 1, 2], 5, 0.4)
    assert re.fullmatch(r"rank 2 makes steps again, after 5[01]\.\d s", line)
    assert node.go_on([0, 1, 2], 50, 0.4) == []


def test_a_stall_of_rank_0_is_reported_by_the_next_rank(node: Node) -> None:
    node.go_on([0, 1, 2], 50, 0.4)
    (line,) = node.go_on([1, 2], 40, 0.4)
    assert line.startswith("rank 0 has made no step for")
    lines = node.go_on([2], 40, 0.4)  # which reports both of them
    assert [line[:6] for line in lines] == ["rank 0", "rank 1"]


def test_a_rank_that_waits_at_a_barrier_is_not_stalled(node: Node) -> None:
    node.go_on([0, 1, 2], 50, 0.4)
    node.steps[2] += 60  # ahead of all others, and waiting for them
    assert node.go_on([0, 1], 60, 0.4) == []


def test_observations_before_a_barrier_are_discarded(node: Node) -> None:
    """An evaluation takes a minute; a rank that is slow in the first steps after it was alive at its end."""
    node.go_on([0, 1, 2], 50, 0.4)
    node.go_on([0, 1], 12, 0.1)
    node.now, node.meetings = node.now + 60, 1
    assert node.go_on([0, 1], 15, 0.4) == []


def test_a_job_stopped_as_a_whole_has_no_stalled_rank(node: Node) -> None:
    node.go_on([0, 1, 2], 50, 1.0)  # checked after every step
    node.now += 3600
    assert node.go_on([0, 1], 9, 0.4) == []  # the third is only slightly later


def test_a_slower_rank_is_not_reported(node: Node) -> None:
    for _ in range(20):
        assert node.go_on([0, 1], 20, 0.4) == []
        assert node.go_on([0, 1, 2], 1, 0.4) == []
