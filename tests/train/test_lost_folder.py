"""A run whose folder was taken over by another start ends without further writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.training_fixtures import Training, checkpoints_of, make_batches

from hpctrain.errors import LockError
from hpctrain.train import run_folder


def files(folder: Path) -> dict[str, bytes]:
    """Return all files but those of an unfinished checkpoint and the metrics, which the other start replaces."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.name != "metrics.jsonl"}


def take(folder: Path) -> None:
    """Take the folder over, as another start does."""
    path = folder / "lock.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "token": "another", "job_id": "43", "host": "n2"}))


def check_every(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(run_folder, "CHECK_EVERY", seconds)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("background", [False, True])
def test_no_checkpoint_is_written_after_losing_the_folder(
    job: Any, shared_tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every(monkeypatch, math.inf)  # which would end rank 0 alone
    folder, seen = shared_tmp_path, []

    def lose_it_in_step_3(step: int, batch: Any) -> None:
        if step == 3 and job.rank == 0:
            take(folder)
            seen.append(files(folder))

    training = Training(job, folder, make_batches(9), every=2, background=background)
    with pytest.raises(LockError, match="is now that of job '43' on 'n2'"):
        training.go(lose_it_in_step_3)
    job.comm.barrier()
    if job.rank == 0:
        assert files(folder) == seen[0]
        assert set(checkpoints_of(folder)) <= {"step_00000002.h5"}


@pytest.mark.ranks(1)
def test_steps_detect_the_loss_without_a_checkpoint(
    job: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every(monkeypatch, 0.0)
    training = Training(job, shared_tmp_path, make_batches(9), every=100)
    with pytest.raises(LockError):
        training.go(lambda step, batch: take(shared_tmp_path) if step == 3 else None)
    assert len(training.losses) <= 4 and not checkpoints_of(shared_tmp_path)
    rows = (shared_tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2
