"""Messages about failed saves: reason, number in a row, newest checkpoint, step of the next attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.train.checkpointing import FailedSaves


def test_failed_saves_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures = FailedSaves(logs=True)
    failures.failed("disk full", 4, tmp_path, 6)
    (tmp_path / "step_00000002.h5").write_bytes(b"")
    failures.failed("disk full", 6, tmp_path, 8)
    failures.succeeded(8)
    failures.succeeded(10)
    failures.failed("quota", 12, tmp_path / "step_00000002.h5", 14)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert {level for level, _ in said} == {"WARNING"}
    first, second, again, third = (text for _, text in said)
    ending = "continuing, the next is tried after step"
    assert first == f"no checkpoint of step 4: disk full; there is no earlier one; {ending} 6"
    newest = f"the newest that exists is {tmp_path / 'step_00000002.h5'}"
    assert second == f"no checkpoint of step 6 (2 failures in a row): disk full; {newest}; {ending} 8"
    assert again == "step 8 is saved, after 2 failures"
    assert "step 12: quota; cannot look into" in third, "a folder that is gone must not end the run"
    assert (failures.total, failures.in_a_row) == (3, 1)


def test_other_ranks_count_without_messages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures = FailedSaves(logs=False)
    failures.failed("disk full", 4, tmp_path, 6)
    failures.succeeded(6)
    assert not caplog.records and (failures.total, failures.in_a_row) == (1, 0)
