"""``run.json``: every attempt and its end, written atomically, without loss of older attempts."""

from __future__ import annotations

import copy
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.faults import file_size_limit
from support.pace import scaled

from hpctrain.errors import UsageError
from hpctrain.train.receipt import write
from hpctrain.train.receipt.write import (
    NAME,
    FailureRecord,
    Receipt,
    catch_up,
    close_unfinished,
    drop,
    earlier_attempts,
    first_line,
    forget_failure,
    read_failure,
    read_receipt,
    rows_of,
    seconds_since_epoch,
)


def test_an_attempt_is_recorded_from_start_to_end(tmp_path: Path) -> None:
    receipt = Receipt(tmp_path, {"torch": "9.9", "first_step": 1})
    assert read_receipt(tmp_path)["status"] == "running"
    receipt.update(step=5)
    assert read_receipt(tmp_path)["attempts"][0]["step"] == 5
    receipt.end("finished", step=9)
    content = json.loads((tmp_path / NAME).read_text())
    (attempt,) = content["attempts"]
    assert content["status"] == attempt["status"] == "finished" and attempt["step"] == 9
    assert attempt["torch"] == "9.9" and attempt["host"] == socket.gethostname() and attempt["pid"] == os.getpid()
    assert attempt["started"] <= attempt["ended"] and attempt["started"].endswith("Z")


def test_an_attempt_without_an_end_was_killed(tmp_path: Path) -> None:
    Receipt(tmp_path, {}).end("stopped", reason="SIGUSR1")
    Receipt(tmp_path, {}).update(step=5)
    Receipt(tmp_path, {}).end("finished")
    attempts = read_receipt(tmp_path)["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["stopped", "killed", "finished"]
    assert (attempts[0]["reason"], attempts[1]["step"]) == ("SIGUSR1", 5)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_the_failure_record_of_another_rank_is_the_reason(tmp_path: Path) -> None:
    Receipt(tmp_path, {"first_step": 1})
    write.FailureRecord(tmp_path, 3).say("\nKeyError: 'a'\nand more", 7)
    Receipt(tmp_path, {"first_step": 1})
    assert not (tmp_path / write.FAILURE_NAME).exists()
    before = read_receipt(tmp_path)["attempts"][0]
    assert (before["status"], before["reason"], before["failed_rank"]) == ("failed", "KeyError: 'a'", 3)
    Receipt(tmp_path, {"first_step": 1})
    assert read_receipt(tmp_path)["attempts"][1]["status"] == "killed", "what was left counts once"


def test_an_older_failure_record_is_not_the_reason(tmp_path: Path) -> None:
    Receipt(tmp_path, {}, started=time.time() + 100)
    write.FailureRecord(tmp_path, 3).say("KeyError: 'a'", 7)
    Receipt(tmp_path, {})
    assert read_receipt(tmp_path)["attempts"][0]["status"] == "killed"


def test_a_rollback_is_recorded(tmp_path: Path) -> None:
    receipt = Receipt(tmp_path, {"first_step": 5}, started=1000.0)
    rows = [{"step": step, "step_seconds": 0.5, "unix_time": 1000.0 + step} for step in range(5, 10)]
    receipt.rewind(rows, 7)
    (attempt,) = read_receipt(tmp_path)["attempts"]
    assert (attempt["step"], attempt["repeated_steps"], attempt["repeated_seconds"]) == (7, 2, 1.0)
    receipt.rewind(rows, 3)  # before the first step of the attempt
    assert read_receipt(tmp_path)["attempts"][0]["first_step"] == 4


OLD: dict[str, Any] = {
    "status": "stopped",
    "attempts": [
        {"hpctrain": "0.1", "size": 4, "started": "2026-01-01T00:00:00Z", "status": "killed", "first_step": 1},
        {"hpctrain": "0.2", "mine": [1, {"a": 2}], "started": "2026-01-01T01:00:00Z", "status": "stopped"}
        | {"first_step": 5, "step": 9, "ended": "2026-01-01T02:00:00Z", "reason": "SIGUSR1"},
    ],
}


def test_receipts_of_earlier_versions_are_kept(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps(OLD))
    Receipt(tmp_path, {"first_step": 10}).end("finished")
    assert read_receipt(tmp_path)["attempts"][:2] == OLD["attempts"]
    running = {**OLD["attempts"][1], "status": "running"}
    del running["ended"], running["reason"]
    (tmp_path / NAME).write_text(json.dumps({"status": "running", "attempts": [running]}))
    Receipt(tmp_path, {"first_step": 10})
    assert read_receipt(tmp_path)["attempts"][0] == running | {"status": "killed"}


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"attempts": 3}', '{"attempts": [3]}', "[" * 100_000])
def test_a_damaged_receipt_is_moved_aside_and_named(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UsageError, match="run.json is damaged"):
        read_receipt(tmp_path)
    Receipt(tmp_path, {})
    assert len(read_receipt(tmp_path)["attempts"]) == 1
    (aside,) = tmp_path.glob("run.json.damaged-*")
    assert aside.read_text() == text and aside.name in caplog.text


def test_an_unreadable_receipt_is_an_error(tmp_path: Path) -> None:
    assert earlier_attempts(tmp_path) == [], "not there is empty"
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(UsageError, match="cannot read the history of the run in .*: it is not a regular file"):
        Receipt(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_failed_write_leaves_the_old_receipt(tmp_path: Path) -> None:
    receipt = Receipt(tmp_path, {})
    before = (tmp_path / NAME).read_text()
    with file_size_limit(10), pytest.raises(OSError, match="File too large"):
        receipt.end("finished")
    assert (tmp_path / NAME).read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


# Failure record of a rank that ends a job: one line, written atomically, which never delays the end of the job --------


def test_a_failure_record_is_read_and_removed(tmp_path: Path) -> None:
    assert read_failure(tmp_path) == {}
    forget_failure(tmp_path)
    FailureRecord(tmp_path, 2).say("ValueError: no\nmore", 7)
    found = read_failure(tmp_path)
    assert (found["reason"], found["rank"], found["step"]) == ("ValueError: no", 2, 7)
    assert abs(found["unix_time"] - time.time()) < 10
    assert [path.name for path in tmp_path.iterdir()] == [write.FAILURE_NAME]
    forget_failure(tmp_path)
    assert read_failure(tmp_path) == {} and not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_an_unreadable_record_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / write.FAILURE_NAME).write_text(text)
    assert read_failure(tmp_path) == {}


def test_a_missing_folder_is_not_an_error(tmp_path: Path) -> None:
    FailureRecord(tmp_path / "gone", 0).say("x", None)


def test_a_hanging_file_system_does_not_delay_the_end(tmp_path: Path) -> None:
    answered = threading.Event()

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        answered.wait(30)  # as a file system without its server
        return function(*arguments)

    began = time.monotonic()
    FailureRecord(tmp_path, 0, call=call, patience=0.1).say("x", None)
    assert 0.1 <= time.monotonic() - began < scaled(5)
    answered.set()


def test_a_long_reason_is_shortened() -> None:
    assert first_line("\n  a\nb") == "a" and first_line("") == ""
    assert len(first_line("x" * 1000)) == 300 and first_line("x" * 1000).endswith("...")


# Final accounts of earlier attempts, compared with a synthetic run whose every second is known ------------------------


EPOCH = "2026-01-01T00:00:{:02}Z"
ZERO = seconds_since_epoch(EPOCH.format(0)) or 0.0


def attempt(started: int, first: int, **facts: Any) -> dict[str, Any]:
    """Return an attempt that started at second ``started`` and has not completed its step ``first``."""
    begun = {"steps": 0, "step_seconds": 0.0, "elapsed_seconds": 0.5, "saved_step": first - 1}
    return {"started": EPOCH.format(started), "status": "running", "first_step": first, **begun, **facts}


def rows(started: int, *steps: int) -> list[dict[str, Any]]:
    """Return rows of steps of one second each; the first step starts two seconds after its attempt."""
    return [
        {"step": step, "step_seconds": 1.0, "unix_time": ZERO + started + 3 + index, "tokens": 100 * step}
        for index, step in enumerate(steps)
    ]


def test_a_step_belongs_to_the_last_attempt_that_ran_it() -> None:
    attempts = [attempt(0, 1), attempt(20, 4), attempt(30, 3), attempt(40, 8)]
    found = rows_of(attempts, [*rows(0, 1, 2), *rows(30, 3, 4, 5), *rows(40, 8)])
    assert [[row["step"] for row in mine] for mine in found] == [[1, 2], [], [3, 4, 5], [8]]
    # The attempt that started at 40 was killed before it could remove the earlier attempt's steps after step 7.
    assert rows_of(attempts, rows(30, 8, 9)) == [[], [], [], []]
    assert rows_of([], rows(0, 1)) == []
    old = [{"step": 1}, {"step": 2, "step_seconds": 1.0}]
    assert rows_of([{"first_step": 1}], old) == [old], "rows and attempts of before there were times"


def test_a_killed_attempt_is_completed_from_the_metrics() -> None:
    killed = attempt(0, 1, step=4, steps=4, step_seconds=4.0, elapsed_seconds=8.0, saved_step=4, tokens=400)
    others = [attempt(50, 7, status="finished")]
    close_unfinished([killed, *others], rows(0, 1, 2, 3, 4, 5, 6), {})
    assert killed["status"] == "killed" and killed["step"] == 6 and killed["tokens"] == 600
    assert (killed["steps"], killed["step_seconds"]) == (6, 6.0)
    assert killed["elapsed_seconds"] == 8.0 + 2.0 and killed["ended"] == EPOCH.format(10)
    assert others == [attempt(50, 7, status="finished")]
    drop([killed], rows(0, 1, 2, 3, 4, 5, 6), 4)
    assert (killed["repeated_steps"], killed["repeated_seconds"]) == (2, 2.0)
    drop([killed], rows(0, 1, 2, 3, 4), 3)  # the checkpoint of step 4 is damaged
    assert (killed["repeated_steps"], killed["repeated_seconds"]) == (3, 3.0)


def test_an_attempt_killed_during_startup_keeps_its_initial_facts() -> None:
    killed = attempt(0, 1)
    close_unfinished([killed], [], {})
    assert killed == attempt(0, 1, status="killed", ended=EPOCH.format(0))


def test_idle_time_counts_up_to_the_failure_record() -> None:
    hung = attempt(0, 1, step=2, steps=2, step_seconds=2.0, elapsed_seconds=4.0)
    failure = {"reason": "all_reduce has not ended", "rank": 0, "host": "n1", "unix_time": ZERO + 40}
    close_unfinished([hung], rows(0, 1, 2), failure)
    assert (hung["status"], hung["failed_rank"], hung["failed_host"]) == ("failed", 0, "n1")
    assert hung["elapsed_seconds"] == 40.0 and hung["steps"] == 2
    late = attempt(45, 3)
    close_unfinished([late], [], failure)
    assert late["status"] == "killed" and "reason" not in late


def test_a_running_attempt_is_updated_from_the_metrics() -> None:
    running = attempt(0, 3, step=3, steps=1, step_seconds=1.0, elapsed_seconds=3.0)
    catch_up(running, rows(0, 3, 4, 5))
    assert running == attempt(0, 3, step=5, steps=3, step_seconds=3.0, elapsed_seconds=5.0, tokens=500)


def test_an_attempt_of_an_earlier_version_gets_no_times() -> None:
    old = {"first_step": 1, "step": 2, "status": "running", "started": EPOCH.format(0)}
    before = copy.deepcopy(old)
    close_unfinished([old], [{"step": 1}, {"step": 2}, {"step": 3}], {})
    assert old == before | {"status": "killed", "step": 3}
