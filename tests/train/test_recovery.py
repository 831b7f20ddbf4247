"""Sections of a recovery, with ranks that are played: what is repeated, handed over and restored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.comm.transport.waiting import interruption
from hpctrain.errors import CommunicationError, RankFailedError
from hpctrain.train.recovery.sections import Progressed, Recovery, StepRepeatsError


class Ranks:
    """Job of this rank and others, whose answers are given; each death leaves the ranks that ``others`` has."""

    def __init__(self) -> None:
        self.others: list[Progressed] = []
        self.results: dict[int, Any] = {}  # what another rank hands over
        self.restored = self.recoveries = 0
        comm = SimpleNamespace(_former=[], _parts=[])
        comm.all_gather_object = lambda own: [own, *self.others]
        comm.broadcast_object = lambda own, root: self.results if root else own
        detector = SimpleNamespace(continues=False, survivors=self._survivors, hosts=["n"] * 3, describe=str)
        guard = SimpleNamespace(detector=detector, failure_record=None, end_with_others=lambda: None)
        copy = SimpleNamespace(take=lambda: None, restore=self._restore, step=4)
        job: Any = SimpleNamespace(comm=comm, guard=guard, rank=1, size=2)
        made: Any = Recovery
        self.made: Recovery = made(job, copy, None, [], lambda facts: None, lambda job, ranks: None)

    def _survivors(self) -> tuple[None, list[int]]:
        self.recoveries += 1
        interruption.reason = ""
        return None, [2]

    def _restore(self, *, together: bool) -> None:
        assert not together
        self.restored += 1


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def fails(times: int, result: Any = "done") -> Callable[[], Any]:
    """Return a collective that fails so often."""
    left = [times]

    def call() -> Any:
        if left[0]:
            left[0] -= 1
            raise RankFailedError("another rank has died")
        return result

    return call


def test_a_section_that_all_are_in_is_repeated(ranks: Ranks) -> None:
    ranks.made.section(fails(0))
    ranks.others = [Progressed(2, None)]
    assert ranks.made.section(fails(2, "second")) == "second"
    assert ranks.recoveries == 2 and not ranks.restored and ranks.made.stale


def test_the_body_is_repeated_from_the_copy(ranks: Ranks) -> None:
    ranks.made.section(fails(0))
    ranks.made.begin_step()
    ranks.others = [Progressed(2, 1)]
    with pytest.raises(StepRepeatsError):
        ranks.made.end_body(fails(1), updated=True)
    assert ranks.restored == 1
    ranks.made.begin_step()
    assert ranks.made.end_body(fails(0, "exchanged"), updated=True) == "exchanged"


def test_a_rank_that_is_behind_gets_the_results_of_the_others(ranks: Ranks) -> None:
    """Another rank has ended this step and two more sections, and is in the next step, which it repeats."""
    ranks.made.begin_step()
    ranks.others = [Progressed(4, 3)]
    ranks.results = {1: "exchanged", 2: "saved", 3: "fetched"}
    assert ranks.made.end_body(fails(1), updated=True) == "exchanged" and not ranks.restored
    ranks.made.end_step()
    assert [ranks.made.section(fails(9)) for _ in range(2)] == ["saved", "fetched"]
    assert ranks.made.section(fails(0, "own")) == "own" and ranks.recoveries == 1


def test_a_rank_that_is_ahead_goes_back_to_its_own_step(ranks: Ranks) -> None:
    ranks.made.begin_step()
    ranks.made.end_body(fails(0), updated=True)
    ranks.made.end_step()
    ranks.made.begin_step()
    ranks.others = [Progressed(1, 0)]
    with pytest.raises(StepRepeatsError):
        ranks.made.end_body(fails(1), updated=True)
    assert ranks.restored == 1


def test_a_known_death_ends_a_section_before_it_begins(ranks: Ranks) -> None:
    ranks.others = [Progressed(1, None)]
    interruption.reason = "rank 2 has died"
    calls: list[str] = []
    assert ranks.made.section(lambda: calls.append("call")) is None
    assert calls == ["call"] and ranks.recoveries == 1


def test_other_errors_and_lost_results_are_raised(ranks: Ranks) -> None:
    with pytest.raises(ZeroDivisionError):
        ranks.made.section(lambda: 1 / 0)
    ranks.others, ranks.results = [Progressed(40, None)], {39: "x"}
    with pytest.raises(CommunicationError, match="rank 1 is too far behind the other ranks"):
        ranks.made.section(fails(1))
    with pytest.raises(RankFailedError):
        ranks.made.contain(RankFailedError("outside of a body"))
