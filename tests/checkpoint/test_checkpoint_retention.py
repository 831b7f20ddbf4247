"""Retention of checkpoints: the last n, every n-th step and the best, as a pure function and in a folder."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint import save
from hpctrain.checkpoint.retention import (
    LOGGED,
    Retention,
    RetentionPolicy,
    StoredCheckpoint,
    best_of,
    list_checkpoints,
    logged_values,
    step_file,
    superseded,
)
from hpctrain.errors import UsageError

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
