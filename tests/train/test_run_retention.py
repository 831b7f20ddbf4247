"""Retention of a run's checkpoints, over resumes and on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import pytest
from support.training_fixtures import Training, checkpoints_of, make_batches, metrics_of

from hpctrain.checkpoint.tools.inspect import judge

SCORES = [5.0, 9.0, 2.0, 7.0, 6.0, 1.0, 8.0, 4.0, 3.0]  # logged in the steps 1 to 9


class Stop(Exception):
    """Exception that ends a run in the middle."""


def scored(job: Any, folder: Path, stop_in: int | None = None, **options: Any) -> Training:
    """Train nine steps that log a score, or until an error in the step ``stop_in``."""
    training = Training(job, folder, make_batches(9), **{"every": 1, "keep": 1, **options})

    def log(step: int, batch: Any) -> None:
        if step == stop_in:
            raise Stop
        # As in an evaluation whose share differs between ranks: the average counts.
        training.run.log(score=SCORES[step - 1] + job.rank - (job.size - 1) / 2)

    try:
        training.go(log)
    except Stop:
        pass
    job.comm.barrier()
    return training


def steps(folder: Path) -> list[int]:
    return [int(name.removeprefix("step_").removesuffix(".h5")) for name in checkpoints_of(folder)]


@pytest.mark.few(3)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "options, left",
    [
        ({}, [9]),
        ({"keep": 3}, [7, 8, 9]),
        ({"keep_every": 4}, [4, 8, 9]),
        ({"keep_best": "score"}, [6, 9]),
        ({"keep_best": "score", "best": "highest"}, [2, 9]),
        ({"keep_best": "score", "keep_every": 5, "keep": 2}, [5, 6, 8, 9]),
        ({"keep_best": "score", "best": "highest", "every": 4}, [4, 9]),  # 9.0 was logged in a step without a save
    ],
)
def test_the_configured_checkpoints_are_kept(
    job: Any, shared_tmp_path: Path, options: dict[str, Any], left: list[int]
) -> None:
    scored(job, shared_tmp_path, **options)
    assert steps(shared_tmp_path) == left


@pytest.mark.few(1)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stop_in", [4, 8])
def test_a_resumed_run_keeps_the_checkpoints_of_an_uninterrupted_one(
    job: Any, shared_tmp_path: Path, stop_in: int
) -> None:
    options = {"keep_best": "score", "best": "highest", "every": 2, "keep_every": 6}
    scored(job, shared_tmp_path / "straight", **options)
    scored(job, shared_tmp_path / "halting", stop_in, **options)
    assert 2 in steps(shared_tmp_path / "halting")
    scored(job, shared_tmp_path / "halting", **options)
    assert steps(shared_tmp_path / "straight") == steps(shared_tmp_path / "halting") == [2, 6, 9]


@pytest.mark.ranks(1, 2)
def test_a_checkpoint_contains_the_logged_values_of_its_step(job: Any, shared_tmp_path: Path) -> None:
    scored(job, shared_tmp_path)
    row = metrics_of(shared_tmp_path)[-1]
    with h5py.File(shared_tmp_path / "checkpoints/step_00000009.h5") as file:
        logged = json.loads(file["train"].attrs["logged.json"])
    assert logged == {name: row[name] for name in ("loss", "rate", "score", "grad_norm")}
    assert logged["score"] == SCORES[8]


@pytest.mark.ranks(1, 2)
def test_a_checkpoint_without_logged_values_is_otherwise_treated_equally(job: Any, shared_tmp_path: Path) -> None:
    """As after an update of hpctrain: older checkpoints do not contain the logged values."""
    first = Training(job, shared_tmp_path, make_batches(9), every=1, keep=1, steps=3)
    note = first.run.state.note

    def forgetful(row: Any) -> None:
        note(row)
        first.run.state.logged = {}

    first.run.state.note = forgetful  # type: ignore[method-assign]
    first.go()
    job.comm.barrier()
    scored(job, shared_tmp_path, keep_best="score", keep_every=3)
    assert steps(shared_tmp_path) == [3, 6, 9]


@pytest.mark.ranks(1, 2)
def test_a_number_that_is_never_logged_is_warned_about_once(job: Any, shared_tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level("WARNING", "hpctrain"):
        scored(job, shared_tmp_path, keep_best="scores")
    assert steps(shared_tmp_path) == [9]
    assert caplog.text.count("step 1 logged no finite number called scores") == (job.rank == 0)
    assert caplog.text.count("called scores") == (job.rank == 0)


def test_a_save_after_a_resume_keeps_its_logged_value(job: Any, tmp_path: Path) -> None:
    scored(job, tmp_path, keep_best="score")
    again = Training(job, tmp_path, make_batches(9), keep_best="score")
    with again.run as run:
        run.save()
    assert run.state.retention.best() == tmp_path / "checkpoints/step_00000006.h5"
    assert run.state.logged["score"] == SCORES[8]


@pytest.mark.ranks(1, 2)
def test_a_checkpoint_records_the_criterion_of_the_best(job: Any, shared_tmp_path: Path) -> None:
    scored(job, shared_tmp_path / "a", keep_best="score", best="highest")
    found = judge(shared_tmp_path / "a")
    assert (found.step, found.by, found.which, found.value) == (2, "score", "highest", 9.0)
    scored(job, shared_tmp_path / "b")
    with h5py.File(shared_tmp_path / "a/checkpoints/step_00000009.h5") as kept:
        assert (kept["train"].attrs["keep_best"], kept["train"].attrs["best"]) == (b"score", b"highest")
        assert kept["train/score"][()].tolist() == SCORES and kept["train/score_step"][()].tolist() == [*range(1, 10)]
    with h5py.File(shared_tmp_path / "b/checkpoints/step_00000009.h5") as plain:
        assert not {"keep_best", "best"} & set(plain["train"].attrs)
    job.comm.barrier()
