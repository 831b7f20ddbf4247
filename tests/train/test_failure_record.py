"""Failure record of a rank that ends a job: one line, written atomically, which never delays the end of the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pace import scaled

from hpctrain.train.receipt import write
from hpctrain.train.receipt.write import FailureRecord, first_line, forget_failure, read_failure


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
