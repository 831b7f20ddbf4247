"""Loop of the background saves, without ranks: a fake save with known times is measured correctly."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from benchmark_helpers import OneRank
from checkpoint_background import background_targets, measure, row_of
from checkpoint_candidates import WrongResult
from checkpoint_state import Values, Work, make_state, snapshot

MIB = 2**20
STALL, BOUNDARY = 0.5, 0.02  # seconds


class Slow:
    """Fake save that stalls for a while, then writes for some steps; its file is a copy in memory."""

    def __init__(self, work: Work, steps: int, late: bool = False) -> None:
        self.name = "slow"
        self.work, self.steps, self.late = work, steps, late
        self.left, self.log = 0, list[str]()
        self.file: dict[str, torch.Tensor] = {}

    def begin(self, step: int) -> None:
        self.log.append(f"begin {step}")
        time.sleep(STALL)
        self.left = self.steps
        if not self.late:
            self.copy()

    def copy(self) -> None:
        self.file = {name: tensor.clone() for name, tensor in self.work.state.tensors()}

    @property
    def pending(self) -> bool:
        return self.left > 0

    def advance(self) -> None:
        time.sleep(BOUNDARY)
        self.left -= 1
        if self.late and not self.left:
            self.copy()

    def check(self, expected: Values) -> str:
        right = all(torch.equal(self.file[name], tensor) for name, tensor in expected)
        return "" if right else "values of another moment"

    def delete(self) -> None:
        self.log.append("delete")
        self.file = {}

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def work() -> Work:
    return Work.of(OneRank(), MIB)  # type: ignore[arg-type]


def test_stalls_and_steps_are_timed_separately(work: Work) -> None:
    saver = Slow(work, 3)
    (row,) = measure(work, OneRank(), [saver], 2)
    assert STALL <= row["stall"] < row["written"]
    assert row["busy"] is not None and BOUNDARY < row["busy"] < STALL and 0 < row["free"] < STALL
    assert row["written"] >= STALL + 3 * BOUNDARY
    assert (row["saves"], row["busy_steps"]) == (2, 6)
    steps = [int(line.split()[1]) for line in saver.log if line.startswith("begin")]
    assert saver.log[-1] == "close"
    assert steps == [9, 18, 27]  # 3 to warm up, then 6 without and 3 during each write


def test_the_file_is_compared_with_the_values_at_the_time_of_the_save(work: Work) -> None:
    saver = Slow(work, 3, late=True)
    with pytest.raises(WrongResult, match="slow: values of another moment"):
        measure(work, OneRank(), [saver], 1)
    assert saver.log[-1] == "close"


def test_without_a_step_during_a_write_its_time_is_missing(work: Work) -> None:
    (row,) = measure(work, OneRank(), [Slow(work, 0)], 1)
    assert (row["busy"], row["busy_steps"]) == (None, 0)


def test_a_write_that_never_ends_is_an_error(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoint_background.LIMIT", 0.1)
    with pytest.raises(WrongResult, match="slow: not written after 0.1 s"):
        measure(work, OneRank(), [Slow(work, 10**6)], 1)


def test_the_slowest_rank_counts_and_each_rank_copies_its_share() -> None:
    first = dict(copy=[2.0], stall=[1.0], free=[1.0, 2.0, 3.0], busy=[4.0], written=[5.0])
    second = dict(copy=[4.0], stall=[0.5], free=[3.0, 2.0, 1.0], busy=[6.0], written=[4.0])
    found = row_of("a", [first, second], 2)
    spread, times = found.pop("spread"), {"stall": 1.0, "floor": 2.0, "free": 3.0, "busy": 6.0, "written": 5.0}
    assert found == {"candidate": "a", **times, "busy_steps": 1, "saves": 1}
    assert spread["free"]["min"] == 2.0 and spread["copy"]["median"] == 4.0


def test_a_snapshot_keeps_its_values_while_training_continues() -> None:
    state = make_state(MIB)
    memory = torch.zeros(state.nbytes // 4)
    before = {name: tensor.clone() for name, tensor in state.tensors()}
    copies, seconds = snapshot(state, memory)
    state.spoil()
    assert all(torch.equal(before[name], tensor) for name, tensor in copies) and seconds > 0


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {"candidate": name, "stall": 1.1, "floor": 1.0, "free": 1.0, "busy": 1.04, **changes}


def test_only_hpctrain_in_the_background_has_targets() -> None:
    assert not list(background_targets([row("torch DCP async"), row("hpctrain foreground")]))
    stall, slower = background_targets([row("torch DCP async"), row("hpctrain background")])
    assert (stall.value, stall.met, slower.value, slower.met) == (1.1, True, 1.04, True)


def test_long_stalls_and_slow_steps_miss_their_targets() -> None:
    stall, slower = background_targets([row("hpctrain background", stall=1.3, busy=1.06)])
    assert not stall.met and not slower.met
    assert [one.wanted for one in (stall, slower)] == ["<= 1.2", "<= 1.05"]


def test_a_write_shorter_than_a_step_has_no_target_for_steps() -> None:
    (stall,) = background_targets([row("hpctrain background", busy=None)])
    assert "stall" in stall.what
