"""Benchmark of faults: its cases, outcomes in words, and the row of a small job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faults
import pytest
from faults import FAULTS, REACTIONS, STRATEGIES, Outcome, alike, cases, cells, markdown, reason, shorten, told

from hpctrain.faults.spec import KINDS
from hpctrain.faults.spec import parse as parse_faults


def test_every_kind_of_fault_is_tried_with_every_strategy() -> None:
    tried = {one.kind for text in FAULTS.values() for one in parse_faults(text)}
    assert tried == set(KINDS)
    known = list(cases(shrinks=True))
    assert {(fault, strategy, "restart") for fault in FAULTS for strategy in STRATEGIES} <= set(known)
    assert {reaction for *_, reaction in known} == set(REACTIONS) and len(known) == len(set(known))
    assert "shrink" not in {reaction for *_, reaction in cases(shrinks=False)}


def test_outcomes_are_told_by_messages() -> None:
    said = (
        "[rank 1 n] x\nhpctrain: rank 0 of 3 on n in step 8 ends the job: rank 1 has left, this one waits in all_reduce"
    )
    assert reason(said) == "rank 1 has left, this one waits in all_reduce"
    assert (
        reason("hpctrain: error: gradient norm is nan in step 8; see on_nonfinite") == "gradient norm is nan in step 8"
    )
    assert reason("nothing") == "the launcher ends the ranks"
    assert told("warning: rank 1 on n has died in step 8: 2 ranks continue after 20 ms") == "2 ranks continue"
    left = "warning: rank 1 on n has died and 1 rank of the same replica left in step 8: 2 ranks continue after 20 ms"
    assert told(left) == "2 ranks continue"
    assert told("warning: memory error in step 8: parameter a of rank 1 on n was wrong; ...") == "named and repaired"
    assert told("step 12/12") == ""
    assert shorten("rank 1 on n07 has died; x") == "rank 1 has died" and len(shorten("y" * 100)) == 60


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"starts": 2, "ended": "rank 1 has died"}, "ends (rank 1 has died), starts again"),
        ({"starts": 3, "ended": "x"}, "ends (x), 2 starts again"),
        ({"notice": "2 ranks continue"}, "2 ranks continue"),
        ({}, "no effect"),
        ({"equal": None, "ended": "bad"}, "ends: bad"),
    ],
)
def test_rows_of_the_table(changed: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"starts": 1, "ended": "", "notice": "", "equal": True, **changed}
    row = cells([Outcome("exit 0", "ddp", "restart", seconds=None, lost=2, **given)])
    assert row[3] == words and row[4:] == ["-", "2", "-" if given["equal"] is None else "yes"]
    text = markdown([["a", "b"], ["x|y", "z"]])
    assert text == "| a | b |\n|---|---|\n| x\\|y | z |\n"


def test_completed_steps_that_a_recovery_repeats_are_lost() -> None:
    """The step in progress was not complete."""
    assert faults.repeated_steps({"repeated_steps": 2}) == 2
    assert (
        faults.repeated_steps({"recoveries": [{"repeated_steps": 1}, {"repeated_steps": 3}, {"repeated_steps": 0}]})
        == 2
    )


def test_strategies_with_the_same_outcome_share_a_row() -> None:
    given: dict[str, Any] = {"starts": 1, "ended": "", "notice": "", "equal": True}
    found = [
        Outcome("NaN", name, "skip", seconds=time, lost=lost, **given)
        for name, time, lost in (("ddp", 0.5, 0), ("zero1", 0.25, 0), ("fsdp", None, 0), ("pipe", 0.5, 1))
    ]
    assert [cells(group) for group in alike(found)] == [
        ["NaN", "ddp, zero1, fsdp", "skip", "no effect", "0.25 to 0.50", "0", "yes"],
        ["NaN", "pipe", "skip", "no effect", "0.50", "1", "yes"],
    ]


def test_the_time_is_that_to_the_next_step_after_the_fault(tmp_path: Path) -> None:
    (tmp_path / "faults.jsonl").write_text('{"unix_time": 10.5}\n')
    rows = [{"step": step, "unix_time": float(8 + step)} for step in range(1, 5)]
    assert (
        faults.seconds_to_next_step(tmp_path, rows) == 0.5 and faults.seconds_to_next_step(tmp_path, rows[:1]) is None
    )
    assert faults.seconds_to_next_step(tmp_path / "none", rows) is None


def test_the_documentation_has_the_committed_tables() -> None:
    root = Path(faults.__file__).parents[1]
    documented, tables = (root / "docs" / "failures.md").read_text(), list(
        (root / "benchmarks/results").glob("faults-*.md")
    )
    assert tables and all(path.read_text() in documented for path in tables)


@pytest.mark.benchmark
@pytest.mark.limit(200)
def test_a_killed_rank_loses_the_steps_since_the_checkpoint(launch: Any, tmp_path: Path) -> None:
    program = Path(faults.__file__)
    words = ["--only", "kill in backward", "--strategies", "ddp", "--out", str(tmp_path)]
    done = launch(0, program, *words, timeout=180)
    assert done.returncode == 0, done
    (path,) = tmp_path.glob("faults-*.json")
    plain, killed, *_ = json.loads(path.read_text())["outcomes"]
    assert plain["starts"] == 1 and plain["equal"] and not plain["lost"]
    assert killed["starts"] == 2 and killed["equal"] and killed["lost"] == 1 and killed["seconds"] > 0
    assert "| kill in backward | ddp | restart | ends (" in path.with_suffix(".md").read_text()
