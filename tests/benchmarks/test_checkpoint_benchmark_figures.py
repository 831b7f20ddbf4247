"""Turns, memory, figures, targets and pictures of the checkpoint benchmark, without ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import checkpoint_figures
import numpy as np
import pytest
from benchmark_helpers import OneRank
from checkpoint_candidates import Candidate, WrongResult
from checkpoint_figures import (
    Figures,
    Growth,
    by_name,
    earlier_targets,
    measure,
    one_turn,
    row_of,
    share_reached,
    targets,
)
from harness.report import Target


@pytest.fixture
def setting() -> Any:
    return OneRank()


def candidate(setting: Any, name: str, **options: Any) -> Candidate:
    parts: dict[str, Any] = {
        "call": lambda: setting.log.append(name),
        "check": lambda: setting.log.append("check") or "",
        "prepare": lambda: setting.log.append("prepare"),
    }
    return Candidate(name, 100, **{**parts, **options})


def test_a_turn_is_prepared_before_and_checked_after_the_timed_call(setting: Any) -> None:
    one_turn(setting, candidate(setting, "a"))
    assert setting.log == ["prepare", "quiet", "|", "a", "rest", "check"]


def test_only_the_call_is_timed(setting: Any) -> None:
    def slow() -> str:
        time.sleep(0.2)
        return ""

    turn = one_turn(setting, candidate(setting, "a", call=lambda: time.sleep(0.05), check=slow, prepare=slow))
    assert 0.05 <= turn.seconds < 0.2 and turn.problem == ""


def test_the_first_round_does_not_count(setting: Any) -> None:
    calls: list[float] = []

    def call() -> None:
        calls.append(0.2 if not calls else 0.0)
        time.sleep(calls[-1])

    (row,), unable = measure(setting, "write", [candidate(setting, "a", call=call)], 3)
    assert (len(calls), row["repeats"], unable) == (4, 3, {})
    assert row["max"] < 0.2 and row["rate"] == pytest.approx(100 / row["median"] / 1e9)


def test_wrong_bytes_end_the_benchmark(setting: Any) -> None:
    with pytest.raises(WrongResult, match=r"^a: model/b is not what was saved \(rank 0\)$"):
        one_turn(setting, candidate(setting, "a", check=lambda: "model/b is not what was saved"))
    setting.others = ["", "step is wrong"]
    with pytest.raises(WrongResult, match=r"^a: step is wrong \(rank 1\)$"):
        one_turn(setting, candidate(setting, "a", call=lambda: None))


def test_a_failing_candidate_is_excluded_with_the_reason(setting: Any) -> None:
    def fail() -> None:
        raise RuntimeError("no such\n  backend")

    able = candidate(setting, "b")
    rows, unable = measure(setting, "write", [candidate(setting, "a", call=fail), able], 2)
    assert [row["candidate"] for row in rows] == ["b"]
    assert unable == {"a": "no such backend (rank 0)"}


def test_a_candidate_that_fails_on_one_rank_is_excluded_on_all(setting: Any) -> None:
    setting.others = ["disk full", "", ""]
    rows, unable = measure(setting, "write", [candidate(setting, "a"), candidate(setting, "b")], 1)
    assert ([row["candidate"] for row in rows], unable) == (["b"], {"a": "disk full (rank 1)"})


def test_the_error_of_a_required_candidate_is_raised(setting: Any) -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        measure(setting, "write", [candidate(setting, "a", call=fail, needed=True)], 1)


def test_a_later_failure_ends_the_benchmark(setting: Any) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("worn out")

    with pytest.raises(WrongResult, match="a: worn out"):
        measure(setting, "write", [candidate(setting, "a", call=fail)], 1)


# Memory of a process --------------------------------------------------------------------------------------------------


SIZE = 64 * 2**20
SLACK = 8 * 2**20


def known(growth: Growth) -> int:
    found = growth.bytes()
    if found is None:
        pytest.skip("this system does not let a process reset its peak")
    return found


def test_the_peak_counts_even_after_the_memory_is_freed() -> None:
    growth = Growth()
    data = np.ones(SIZE, np.uint8)
    del data
    assert SIZE - SLACK < known(growth) < SIZE + SLACK


def test_earlier_memory_does_not_count() -> None:
    data = np.ones(SIZE, np.uint8)
    assert known(Growth()) < SLACK
    del data
    assert known(Growth()) < SLACK


def test_the_growth_is_unknown_if_the_peak_cannot_be_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_figures, "_CLEAR", tmp_path / "missing" / "clear_refs")
    assert Growth().bytes() is None


# Targets --------------------------------------------------------------------------------------------------------------


GB = 10**9


def figures(**seconds: float) -> Figures:
    """Return figures of 2 GB by name ("raw_pwrite" for "raw pwrite") and median."""
    rows = [row_of("write", name.replace("_", " "), 2 * GB, [median], None) for name, median in seconds.items()]
    return by_name(rows)


def found(made: Figures) -> dict[str, Target]:
    return {one.what: one for one in targets(made)}


def only(start: str, made: Figures) -> Target:
    (one,) = [target for what, target in found(made).items() if what.startswith(start)]
    return one


@pytest.mark.parametrize("name, wanted", [("raw_pwrite", 0.95), ("torch.save", 3.0), ("torch_DCP", 1.0)])
def test_saving_is_compared_with_each_other_library(name: str, wanted: float) -> None:
    just = only("write", figures(**{"hpctrain": 1.0, name: wanted}))
    assert (just.value, just.target, just.met) == (wanted, wanted, True)
    assert not only("write", figures(**{"hpctrain": 1.01, name: wanted})).met


def test_a_slow_disk_limits_the_target_of_reading() -> None:
    made = figures(raw_preadv=2.0, hpctrain_load=2.5, hpctrain_verify=2.2)  # 1 GB/s raw
    assert only("load: speed", made).value == pytest.approx(0.8) and not only("load: speed", made).met
    assert only("verify", made).value == pytest.approx(2 / 2.2) and only("verify", made).met


def test_on_a_fast_disk_checksums_limit_the_target_of_reading() -> None:
    made = figures(raw_preadv=0.2, hpctrain_load=1.0, hpctrain_verify=1.2)  # 10 GB/s raw
    assert only("load: speed", made).value == pytest.approx(1.0)
    assert only("verify", made).value == pytest.approx(1 / 1.2) and not only("verify", made).met


def test_the_slowest_of_the_other_rank_counts_is_compared() -> None:
    made = figures(**{"hpctrain_load": 1.0, "hpctrain_load,_1_wrote": 1.1, "hpctrain_load,_4_wrote": 1.3})
    one = only("load: time", made)
    assert (one.value, one.met, one.wanted) == (1.3, False, "<= 1.2")
    assert "(4 wrote)" in one.what


def test_without_figures_there_are_no_targets() -> None:
    assert not found({}) and not found(figures(hpctrain=1.0)) and not found(figures(torch_DCP=1.0))


def test_missing_results_give_no_lines(tmp_path: Path) -> None:
    assert not list(earlier_targets(tmp_path))
    (tmp_path / "kill.json").write_text("{")
    assert not list(earlier_targets(tmp_path))


def test_undetected_damage_is_counted(tmp_path: Path) -> None:
    counts = [{"mutation": "flipped bit", "named": "structure", "times": times} for times in (9_000, 1_000)]
    path = tmp_path / "corruption.json"
    path.write_text(json.dumps({"counts": counts, "wrong": []}))
    assert [(one.value, one.met) for one in earlier_targets(tmp_path)] == [(10_000, True), (0, True)]
    path.write_text(json.dumps({"counts": counts[:1], "wrong": ["loaded"]}))
    assert [(one.value, one.met) for one in earlier_targets(tmp_path)] == [(9_000, False), (1, False)]


def test_kills_of_both_forms_are_counted(tmp_path: Path) -> None:
    for kills, met in ((188, True), (187, False)):
        forms = {"foreground": {"kills": kills}, "background": {"kills": 12}}
        (tmp_path / "kill.json").write_text(json.dumps({"forms": forms}))
        (found,) = earlier_targets(tmp_path)
        assert (found.value, found.met) == (kills + 12, met)
        assert found.what == "kill: survived, foreground and background"


@pytest.mark.parametrize(
    "value, wanted, share",
    [
        (0.5, ">= 1", 0.5),
        (3.0, ">= 2", 1.5),
        (2.4, "<= 1.2", 0.5),
        (0.6, "<= 1.2", 2.0),
        (0, "<= 0", 1),
        (2, "<= 0", 0),
    ],
)
def test_longer_bars_are_better(value: float, wanted: str, share: float) -> None:
    assert share_reached({"value": value, "wanted": wanted}) == pytest.approx(share)
