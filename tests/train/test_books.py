"""The books of a run: lock, metrics, receipt and settings go together."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.life import metrics_of, receipt_of

from hpctrain.errors import LockError
from hpctrain.train.books import Books
from hpctrain.train.metrics import Metrics
from hpctrain.train.receipt import Receipt


def test_an_attempt_from_lock_to_release(tmp_path: Path) -> None:
    books = Books(tmp_path, "42")
    books.lock()
    assert json.loads((tmp_path / "lock.json").read_text())["job_id"] == "42"
    books.open(3, "x = 1\n", {"size": 2})
    books.record({"step": 4, "step_seconds": 0.5})
    books.record({"step": 5, "step_seconds": 0.25})
    books.rewind(4)
    books.waited(0.125)
    books.saved(4, 0.12345)
    with pytest.raises(LockError):
        Books(tmp_path, "43").lock()
    books.close("stopped", 4, "SIGUSR1")
    (row,) = metrics_of(tmp_path)
    assert row["step"] == 4 and abs(row["unix_time"] - time.time()) < 60
    assert (tmp_path / "config.toml").read_text() == "x = 1\n"
    (attempt,) = receipt_of(tmp_path)["attempts"]
    facts = {"size": 2, "first_step": 4, "step": 4, "saved_step": 4, "last_save_seconds": 0.123}
    spent = {"steps": 2, "step_seconds": 0.75, "repeated_steps": 1, "repeated_seconds": 0.25, "save_seconds": 0.125}
    assert (facts | spent | {"status": "stopped", "reason": "SIGUSR1"}).items() <= attempt.items()
    assert not (tmp_path / "lock.json").exists()


def test_on_other_ranks_nothing_is_written(tmp_path: Path) -> None:
    books = Books(tmp_path, None)
    books.record({"step": 1})
    books.rewind(0)
    books.saved(1, 1.0)
    books.close("finished", 1, None)
    assert not list(tmp_path.iterdir())


def test_a_receipt_that_fails_still_gives_the_folder_back(tmp_path: Path) -> None:
    books = Books(tmp_path, None)
    books.lock()
    books.open(0, None, {})
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OSError):
        books.close("finished", 1, None)
    assert not (tmp_path / "lock.json").exists()


def _refuse(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("lenient", [False, True])
def test_what_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lenient: bool
) -> None:
    books = Books(tmp_path, None, lenient=lenient)
    books.lock()
    books.open(0, None, {})
    monkeypatch.setattr("hpctrain.train.metrics.Metrics.write", _refuse)
    monkeypatch.setattr("hpctrain.train.receipt.Receipt.update", _refuse)
    for note in (lambda: books.record({"step": 1}), lambda: books.saved(1, 0.1), lambda: books.failed_save(1, "x", 1)):
        if lenient:
            note()
        else:
            with pytest.raises(OSError, match="no space left"):
                note()
    books.close("finished", 1, None)
    said = f"cannot write into {tmp_path}: No space left on device; going on without"
    assert [record.getMessage() for record in caplog.records] == [said] * lenient


@pytest.mark.parametrize("lenient", [False, True])
def test_a_failure_is_not_hidden_by_books_that_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lenient: bool
) -> None:
    books = Books(tmp_path, None, lenient=lenient)
    books.lock()
    books.open(0, None, {})
    close = Metrics.close
    monkeypatch.setattr(Metrics, "close", lambda metrics: (close(metrics), _refuse()))
    monkeypatch.setattr("hpctrain.train.receipt.Receipt.end", _refuse)
    books.close("failed", 1, "CheckpointError: disk full")
    assert not (tmp_path / "lock.json").exists()


def test_failed_saves_are_counted(tmp_path: Path) -> None:
    books = Books(tmp_path, None)
    books.lock()
    books.open(0, None, {})
    books.failed_save(4, "disk full", 1)
    books.failed_save(6, "quota", 2)
    (attempt,) = receipt_of(tmp_path)["attempts"]
    assert attempt["failed_saves"] == 2 and attempt["last_failed_save"] == {"step": 6, "reason": "quota"}
    books.close("finished", 8, None)


def test_the_receipt_is_written_on_the_way_and_not_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    update = Receipt.update
    monkeypatch.setattr(Receipt, "update", lambda receipt, **facts: (writes.append(1), update(receipt, **facts)))
    books = Books(tmp_path, None)
    books.lock()
    books.open(0, None, {})
    for step in range(1, 50):
        books.record({"step": step, "step_seconds": 1.0})
        written = receipt_of(tmp_path)["attempts"][0]["steps"]
        assert (written, len(writes)) == ((1, 1) if step <= 20 else (20, 2))
        if step == 20:
            books.saved(20, 0.1)
            assert len(writes) == 2 and receipt_of(tmp_path)["attempts"][0]["step"] == 20
    books.close("failed", 49, "KeyError: 'a'\nmore", 0)
    (attempt,) = receipt_of(tmp_path)["attempts"]
    assert (attempt["reason"], attempt["failed_rank"], attempt["steps"]) == ("KeyError: 'a'", 0, 49)


def _kill(books: Books) -> None:
    """Leave all files of some books as they are."""
    assert books._metrics is not None
    books._metrics.close()
    (books.folder / "lock.json").unlink()


def test_a_kill_between_receipt_and_metrics_loses_nothing(tmp_path: Path) -> None:
    """The next attempt has accounted for the steps that it will do again, and dies before it drops them."""
    books = Books(tmp_path, None)
    books.lock()
    books.open(0, None, {})
    for step in (1, 2, 3):
        books.record({"step": step, "step_seconds": 1.0})
        if step == 2:
            books.saved(2, 0.1)
    before = (tmp_path / "metrics.jsonl").read_text()
    _kill(books)
    time.sleep(1.1)  # by less, clocks may differ
    for _ in range(2):
        again = Books(tmp_path, None)
        again.lock()
        again.open(2, None, {})
        _kill(again)
        (tmp_path / "metrics.jsonl").write_text(before)
    first, second, _ = receipt_of(tmp_path)["attempts"]
    assert (first["status"], first["steps"], first["repeated_steps"]) == ("killed", 3, 1)
    assert (second["status"], second["steps"], second.get("repeated_steps")) == ("killed", 0, None)
