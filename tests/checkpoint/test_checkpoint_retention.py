"""Checkpoints of a folder: the newest valid one, and retention, as a pure function and in a folder."""

from __future__ import annotations

import logging
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import flip, step_file

from hpctrain.checkpoint import save
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.retention import (
    LOGGED,
    Retention,
    RetentionPolicy,
    StoredCheckpoint,
    best_of,
    keep_last,
    list_checkpoints,
    logged_values,
    newest_valid,
    remove_leftovers,
    superseded,
)
from hpctrain.cli.main import main
from hpctrain.errors import CheckpointError, UsageError

VALUES = [None, math.nan, math.inf, -math.inf, -1.5, 0.0, 0.25, 0.25, 3.0]


def candidates(*values: float | None) -> list[StoredCheckpoint]:
    """Return the checkpoints of the steps 10, 20, ... with these values."""
    return [StoredCheckpoint(f"step {10 * n}", 10 * n, value) for n, value in enumerate(values, 1)]


def steps(kept: list[StoredCheckpoint]) -> list[int]:
    return [one.step for one in kept]


def test_last_every_and_best_each_keep_their_checkpoints() -> None:
    found = candidates(5.0, 1.0, 4.0, 3.0, 2.0, 6.0)
    assert steps(superseded(found, RetentionPolicy(last=2))) == [10, 20, 30, 40]
    assert steps(superseded(found, RetentionPolicy(last=2, every=30))) == [10, 20, 40]
    assert steps(superseded(found, RetentionPolicy(last=2, best="loss"))) == [10, 30, 40]
    assert steps(superseded(found, RetentionPolicy(last=1, best="loss", which="highest"))) == [10, 20, 30, 40, 50]
    assert steps(superseded(found, RetentionPolicy(last=1, every=50, best="loss"))) == [10, 30, 40]
    assert superseded(found, RetentionPolicy(last=6)) == superseded([], RetentionPolicy()) == []


def test_the_earliest_of_equal_values_is_the_best() -> None:
    found = candidates(2.0, 1.0, 1.0, 1.0)
    assert best_of(found) == found[1] and best_of(found[::-1]) == found[1] and best_of(found, "highest") == found[0]


def test_a_checkpoint_without_a_value_is_never_the_best() -> None:
    found = candidates(None, math.nan, -math.inf, 7.0, math.inf)
    assert best_of(found) == best_of(found, "highest") == found[3]
    assert best_of(candidates(None, math.nan)) is None
    assert steps(superseded(candidates(None, None, None), RetentionPolicy(last=1, best="loss"))) == [10, 20]


@pytest.mark.parametrize("seed", range(300))
def test_any_folder_agrees_with_the_definition(seed: int) -> None:
    """Compare with the definition in its other form, which decides for each file by itself whether it stays."""
    draw = random.Random(seed)
    numbers = draw.sample(range(60), draw.randrange(12))
    found = [StoredCheckpoint(f"f{number}", number, draw.choice(VALUES)) for number in numbers]
    which = draw.choice(["lowest", "highest"])
    best = draw.choice(["", "loss"])
    keep = RetentionPolicy(draw.randint(1, 4), draw.choice([0, 1, 5, 7]), best, which)  # type: ignore[arg-type]
    gone = superseded(found, keep)
    assert steps(gone) == sorted(steps(gone)) and set(gone) <= set(found) and len(set(gone)) == len(gone)
    for one in found:
        newer = sum(other.step > one.step for other in found)
        finite = [other for other in found if other.value is not None and math.isfinite(other.value)]
        beaten = one not in finite or any(_beats(other, one, which) for other in finite)
        asked = newer < keep.last or (keep.every and one.step % keep.every == 0) or (keep.best and not beaten)
        assert (one in gone) == (not asked), (one, keep)
    staying = [one for one in found if one not in gone]
    assert superseded(staying, keep) == [], "deleting once more must delete nothing"


def _beats(other: StoredCheckpoint, one: StoredCheckpoint, which: str) -> bool:
    assert other.value is not None and one.value is not None
    if other.value == one.value:
        return other.step < one.step
    return other.value < one.value if which == "lowest" else other.value > one.value


@pytest.mark.parametrize("seed", range(20))
def test_deleting_after_each_save_never_loses_the_best(seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.choice([*VALUES, draw.random()]) for _ in range(30)]
    keep, present, everything = (
        RetentionPolicy(last=2, every=100, best="loss"),
        list[StoredCheckpoint](),
        candidates(*values),
    )
    for number, one in enumerate(everything, 1):
        present.append(one)
        for old in superseded(present, keep):
            present.remove(old)
        best = best_of(everything[:number])
        assert best is None or best in present
    assert {100, 200, 300} <= set(steps(present)) and len(present) <= 3 + 2 + 1


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": -1}, {"which": "best"}])
def test_invalid_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="cannot keep"):
        RetentionPolicy(**wrong)  # type: ignore[arg-type]


# In a folder ----------------------------------------------------------------------------------------------------------


def write(folder: Path, step: int, logged: object = None) -> Path:
    """Save a tiny model as the checkpoint of a step."""
    path = folder / step_file(step)
    train = {"step": step} if logged is None else {"step": step, LOGGED: logged}
    save(path, model=torch.nn.Linear(1, 1), train=train)
    return path


def present(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("step_")) for path in list_checkpoints(folder)]


def test_the_best_checkpoint_is_read_from_the_files(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 0.5), (3, 2.0), (4, 2.5)):
        write(tmp_path, step, {"loss": loss, "accuracy": -loss})
        Retention(tmp_path, RetentionPolicy(last=1, best="loss")).apply()  # as after a restart: no state in memory
    assert present(tmp_path) == [2, 4]
    assert Retention(tmp_path, RetentionPolicy(best="loss")).best() == tmp_path / step_file(2)
    assert Retention(tmp_path, RetentionPolicy(best="accuracy", which="highest")).best() == tmp_path / step_file(2)
    assert (
        Retention(tmp_path, RetentionPolicy(best="other")).best() is None
        and Retention(tmp_path, RetentionPolicy()).best() is None
    )


@pytest.mark.parametrize("logged", [None, {}, {"loss": "low"}, {"loss": None}, {"loss": [1]}, [1, 2], "loss", 10**400])
def test_files_without_the_value_are_treated_as_ordinary_files(tmp_path: Path, logged: object) -> None:
    write(tmp_path, 1, logged)
    write(tmp_path, 2, {"loss": 9.0})
    write(tmp_path, 3, logged)
    write(tmp_path, 4, {"loss": 9.5})
    retention = Retention(tmp_path, RetentionPolicy(last=1, best="loss"))
    assert [path.name for path in retention.apply()] == [step_file(1), step_file(3)] and present(tmp_path) == [2, 4]


def test_each_file_is_read_once(tmp_path: Path) -> None:
    opened = list[str]()

    def counting(path: Path) -> dict[str, Any]:
        opened.append(path.name)
        return logged_values(path)

    retention = Retention(tmp_path, RetentionPolicy(last=1, every=1, best="loss"), counting)
    for step in range(1, 6):
        retention.apply(verified=write(tmp_path, step, {"loss": float(step)}))
    assert sorted(opened) == [step_file(step) for step in range(1, 6)]
    write(tmp_path, 3, {"loss": 0.0})  # another file of the same name, as after a rollback
    assert retention.best() == tmp_path / step_file(3)


def test_an_unreadable_file_is_kept_if_it_may_be_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(1, 5):
        write(tmp_path, step, {"loss": float(step)})
    (tmp_path / step_file(1)).write_bytes(b"torn")
    Retention(tmp_path, RetentionPolicy(last=1, best="loss")).apply()
    assert present(tmp_path) == [1, 2, 4]
    assert f"{step_file(1)} is kept: cannot determine whether it is the best" in caplog.text
    Retention(tmp_path, RetentionPolicy(last=1)).apply()
    assert present(tmp_path) == [4]


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
