"""``run.json``: every attempt and how it ended, never torn."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from hpctrain.train.receipt import NAME, Receipt, read


def test_an_attempt_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    receipt = Receipt(tmp_path, {"torch": "9.9", "first_step": 1})
    assert read(tmp_path)["status"] == "running"
    receipt.update(step=5)
    assert read(tmp_path)["attempts"][0]["step"] == 5
    receipt.end("finished", step=9)
    content = json.loads((tmp_path / NAME).read_text())
    (attempt,) = content["attempts"]
    assert content["status"] == attempt["status"] == "finished" and attempt["step"] == 9
    assert attempt["torch"] == "9.9" and attempt["host"] == socket.gethostname() and attempt["pid"] == os.getpid()
    assert attempt["started"] <= attempt["ended"] and attempt["started"].endswith("Z")


def test_one_that_did_not_come_to_its_end_was_killed(tmp_path: Path) -> None:
    Receipt(tmp_path, {}).end("stopped", reason="SIGUSR1")
    Receipt(tmp_path, {}).update(step=5)
    Receipt(tmp_path, {}).end("finished")
    attempts = read(tmp_path)["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["stopped", "killed", "finished"]
    assert (attempts[0]["reason"], attempts[1]["step"]) == ("SIGUSR1", 5)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_a_receipt_that_cannot_be_read_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    assert read(tmp_path) == {}
    Receipt(tmp_path, {})
    assert len(read(tmp_path)["attempts"]) == 1


def test_a_write_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = Receipt(tmp_path, {})
    before = (tmp_path / NAME).read_text()
    monkeypatch.setattr(Path, "replace", _fail)
    with pytest.raises(OSError):
        receipt.end("finished")
    assert (tmp_path / NAME).read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def _fail(*args: object) -> None:
    raise OSError("disk full")
