"""State of runs: status, rates, remaining time, shares of the time, notes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.watched_runs import MakeRun

from hpctrain.errors import UsageError
from hpctrain.watch.state import read_state


def test_rates_and_remaining_time_follow_from_the_rows(make_run: MakeRun) -> None:
    now = time.time()
    state = read_state(make_run(job_ends=now + 300.0), now)
    assert state.status == "running" and state.step == 200 and state.target == 1000 and state.fraction == 0.2
    assert state.steps_a_second == pytest.approx(2.0) and state.left == pytest.approx(400.0)
    assert state.rate is not None and state.rate[0] == pytest.approx(2 * 4096) and state.rate[1] == "tokens"
    assert state.job_left == pytest.approx(300.0) and state.silent is None
    assert state.values["loss"] == pytest.approx(2.015) and state.values["validation_loss"] == pytest.approx(2.715)
    shares = {"data": 0.05, "forward": 0.15, "backward": 0.3, "communication": 0.1, "optimizer": 0.2, "saving": 0.02}
    assert state.shares == pytest.approx({**shares, "other": 0.18})
    assert list(state.shares) == [*shares, "other"]


def test_passes_are_one_share_in_rows_of_earlier_versions(make_run: MakeRun) -> None:
    folder = make_run()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for name in ("forward_seconds", "backward_seconds", "save_seconds"):
            del row[name]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shares = {"data": 0.05, "communication": 0.1, "optimizer": 0.2, "forward, backward and other": 0.65}
    assert read_state(folder).shares == pytest.approx(shares)


def test_times_before_this_start_do_not_count(make_run: MakeRun) -> None:
    folder = make_run()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for one in rows[:-20]:
        one["unix_time"] -= 3600.0  # the job has waited in the queue meanwhile
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    content = json.loads((folder / "run.json").read_text())
    content["attempts"][-1]["unix_time"] = rows[-20]["unix_time"] - 1.0
    (folder / "run.json").write_text(json.dumps(content))
    state = read_state(folder)
    assert state.steps_a_second == pytest.approx(2.0) and state.shares["data"] == pytest.approx(0.05)


def test_samples_count_if_there_are_no_tokens(make_run: MakeRun) -> None:
    folder = make_run(batch=64)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({name: one[name] for name in one if name != "tokens"}) + "\n" for one in rows)
    (folder / "metrics.jsonl").write_text(text)
    assert read_state(folder).rate == (pytest.approx(128.0), "samples")


def test_a_run_without_steps_for_long_is_silent(make_run: MakeRun) -> None:
    assert read_state(make_run("a", ago=119.0)).silent is None
    state = read_state(make_run("b", ago=150.0))
    assert state.silent == pytest.approx(150.0, abs=5.0) and state.status == "running"
    assert read_state(make_run("slow", ago=150.0, every=30.0)).silent is None
    assert read_state(make_run("done", ago=150.0, status="finished")).silent is None


@pytest.mark.parametrize(
    "facts, failure, status, why",
    [
        ({"status": "finished"}, {}, "finished", "finished"),
        ({"status": "stopped", "reason": "SIGUSR1"}, {}, "stopped", "saved: SIGUSR1"),
        ({"status": "failed", "reason": "ValueError: a"}, {}, "failed", "failed: ValueError: a"),
        ({}, {"reason": "b", "failed_rank": 3}, "failed", "failed on rank 3: b"),
        ({"host": "other"}, {}, "killed", "killed (no exit record); last recorded step 200"),
    ],
)
def test_a_run_that_has_ended_says_why(
    make_run: MakeRun, facts: dict[str, Any], failure: dict[str, Any], status: str, why: str
) -> None:
    folder = make_run(**facts)
    if failure:
        (folder / "failure.json").write_text(json.dumps(failure))
    state = read_state(folder)
    assert (state.status, state.why, state.left) == (status, why, None)


def test_notes_name_what_is_unusual(make_run: MakeRun) -> None:
    slow = {"rank": 3, "host": "n2", "cause": "loader", "first_step": 40, "slow_steps": 9, "seconds_lost": 3.0}
    died = {"ranks": [5], "hosts": ["n7"], "step": 90, "seconds": 0.2, "ranks_left": 7, "repeated_steps": 1}
    folder = make_run(slow_ranks=[slow], recoveries=[died], memory_errors=2, failed_saves=1)
    content = json.loads((folder / "run.json").read_text())
    content["attempts"].insert(0, {"status": "failed", "reason": "a node died", "step": 12})
    (folder / "run.json").write_text(json.dumps(content))
    state = read_state(folder)
    assert state.starts == 2 and state.failures == 1
    assert state.notes == (
        "rank 3 on n2 is slow from step 40 on: loader",
        "rank 5 on n7 died in step 90; the others continued",
        "2 memory errors found and repaired",
        "1 checkpoints could not be written",
        "start 2: the one before failed: a node died",
    )


def test_a_run_without_rows_has_begun(make_run: MakeRun) -> None:
    folder = make_run(steps=0)
    state = read_state(folder)
    assert (state.status, state.step, state.values, state.rate, state.left) == ("running", 0, {}, None, None)
    (folder / "metrics.jsonl").unlink()
    assert read_state(folder).step == 0


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, make_run: MakeRun) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_state(tmp_path / "missing")
    with pytest.raises(UsageError, match="is no run, or has not begun: it has no run.json"):
        read_state(tmp_path)
    folder = make_run()
    (folder / "run.json").write_text("{")
    with pytest.raises(UsageError, match="run.json is damaged"):
        read_state(folder)
