"""``run.json``: every attempt and its end, written atomically, without loss of older attempts."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from support.faults import file_size_limit

from hpctrain.errors import UsageError
from hpctrain.train.receipt import write
from hpctrain.train.receipt.write import NAME, Receipt, earlier_attempts, read_receipt


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
