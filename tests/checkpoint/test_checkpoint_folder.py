"""Checkpoint folders: the newest valid file is found by reading, and no file that is still needed is deleted."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import flip

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.retention import (
    Retention,
    RetentionPolicy,
    keep_last,
    list_checkpoints,
    newest_valid,
    remove_leftovers,
    step_file,
)
from hpctrain.cli.main import main
from hpctrain.errors import CheckpointError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (2, 10, 100_000_000, 30):
        write_file(tmp_path / step_file(step), [Source.of("/model/w", np.full(4, step, dtype="<f4"))], {})
    (tmp_path / ".step_00000040.h5.tmp-host-1").write_bytes(b"torn")
    (tmp_path / "notes.txt").write_text("keep")
    return tmp_path


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_checkpoints_are_ordered_by_step(folder: Path) -> None:
    steps = ["00000002", "00000010", "00000030", "100000000"]
    assert names(list_checkpoints(folder)) == [f"step_{step}.h5" for step in steps]
    assert list_checkpoints(folder / "none") == []


def test_a_damaged_newest_file_is_ignored_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_valid(folder) == folder / "step_100000000.h5"
    flip(folder / "step_100000000.h5", 100)
    (folder / "step_00000030.h5").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "hpctrain"):
        assert newest_valid(folder) == folder / "step_00000010.h5"
    first, second = (record.getMessage() for record in caplog.records)
    assert "step_100000000.h5 is not used" in first and "damaged" in first
    assert "step_00000030.h5 is not used" in second and "is empty" in second


def test_strict_mode_raises_if_the_newest_is_damaged(folder: Path) -> None:
    assert newest_valid(folder, strict=True) == folder / "step_100000000.h5"
    flip(folder / "step_100000000.h5", 100)
    with pytest.raises(CheckpointError, match="step_100000000.h5"):
        newest_valid(folder, strict=True)


def test_an_empty_folder_is_no_error_but_only_damaged_files_are(folder: Path) -> None:
    assert newest_valid(folder / "none") is None
    for path in list_checkpoints(folder):
        flip(path, 100)
    with pytest.raises(CheckpointError, match="none of the 4 checkpoints"):
        newest_valid(folder)


def test_the_oldest_files_are_deleted(folder: Path) -> None:
    assert names(keep_last(folder, 2)) == ["step_00000002.h5", "step_00000010.h5"]
    assert names(list_checkpoints(folder)) == ["step_00000030.h5", "step_100000000.h5"]
    assert keep_last(folder, 2) == [] and (folder / "notes.txt").exists()


def test_no_file_is_deleted_while_the_newest_is_damaged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(folder / "step_100000000.h5", 100)
    for keep in (RetentionPolicy(last=1), RetentionPolicy(last=1, best="loss"), RetentionPolicy(last=1, every=3)):
        assert Retention(folder, keep).apply() == []
    assert "older checkpoints are kept: the newest is not valid" in caplog.text
    assert keep_last(folder, 1, verified=folder / "step_00000030.h5") == [], "only the newest counts"
    assert len(list_checkpoints(folder)) == 4


def test_a_file_just_committed_is_not_read_again(folder: Path) -> None:
    flip(folder / "step_100000000.h5", 100)
    assert keep_last(folder, 3) == []
    assert len(keep_last(folder, 3, verified=folder / "step_100000000.h5")) == 1


def test_at_least_one_is_kept(folder: Path) -> None:
    with pytest.raises(UsageError, match="keep at least 1"):
        keep_last(folder, 0)


def test_temporary_files_of_killed_writers_are_removed(folder: Path) -> None:
    assert names(remove_leftovers(folder)) == [".step_00000040.h5.tmp-host-1"]
    assert remove_leftovers(folder) == [] and remove_leftovers(folder / "none") == []
    assert len(list_checkpoints(folder)) == 4 and (folder / "notes.txt").exists()


def test_a_file_whose_name_has_another_step_is_not_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (9, 10):
        write_file(tmp_path / f"step_{step:08d}.h5", [], {"/": {"step": step, "world_size": 1}})
    (tmp_path / "step_00000010.h5").rename(tmp_path / "step_00000099.h5")
    assert newest_valid(tmp_path) == tmp_path / "step_00000009.h5"
    assert "step_00000099.h5 holds step 10, its name says 99" in caplog.text
    with pytest.raises(CheckpointError, match="holds step 10, its name says 99: rename it, or move it away"):
        newest_valid(tmp_path, strict=True)
    assert keep_last(tmp_path, 1) == [], "nothing is deleted in favour of such a file"
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert "step 10 (named 99: not used to resume)" in capsys.readouterr().out
