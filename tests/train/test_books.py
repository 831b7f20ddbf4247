"""The books of a run: lock, metrics, receipt and settings go together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.life import metrics_of, receipt_of

from hpctrain.errors import LockError
from hpctrain.train.books import Books


def test_an_attempt_from_lock_to_release(tmp_path: Path) -> None:
    books = Books(tmp_path, "42")
    books.lock()
    assert json.loads((tmp_path / "lock.json").read_text())["job_id"] == "42"
    books.open(3, "x = 1\n", {"size": 2})
    books.record({"step": 4})
    books.record({"step": 5})
    books.rewind(4)
    books.saved(4, 0.12345)
    with pytest.raises(LockError):
        Books(tmp_path, "43").lock()
    books.close("stopped", 4, "SIGUSR1")
    assert metrics_of(tmp_path) == [{"step": 4}] and (tmp_path / "config.toml").read_text() == "x = 1\n"
    (attempt,) = receipt_of(tmp_path)["attempts"]
    facts = {"size": 2, "first_step": 4, "step": 4, "last_save_seconds": 0.123}
    assert (facts | {"status": "stopped", "reason": "SIGUSR1"}).items() <= attempt.items()
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
