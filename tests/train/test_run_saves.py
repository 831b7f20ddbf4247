"""Checkpoints of whole jobs: the best one is kept, a full disk is an error, a second run starts from a model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
from fakes.machine import join_quietly
from support.disks import PLENTY, shared_disk
from support.train_runs import shared_project
from support.training_fixtures import checkpoints_of, metrics_of, receipt_of

from hpctrain.train.config import load
from hpctrain.train.recipe import train

HPCTRAIN = "import sys; from hpctrain.cli.main import main; sys.exit(main())\n"


@pytest.fixture
def config(shared_tmp_path: Path, comm: Any) -> Path:
    """Return the config of a small run, the same file on all ranks."""
    return shared_project(comm, shared_tmp_path) / "tiny.toml"


@pytest.fixture
def trained(launch: Any, config: Path) -> Any:
    """Return a function that runs ``hpctrain train`` with the words as settings."""

    def run(n: int, folder: Path, *words: str, env: dict[str, str] = {}) -> Any:
        settings = [part for word in (f"run.folder={folder}", *words) for part in ("--set", word)]
        return launch(n, HPCTRAIN, "train", config, *settings, cwd=config.parent, env=env, timeout=60)

    return run


@pytest.fixture
def trained_here(config: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function like ``trained`` that uses the ranks of this session, which have imported torch already."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(config.parent)
    monkeypatch.syspath_prepend(str(config.parent))
    monkeypatch.delitem(sys.modules, "bytes_model", raising=False)
    return lambda folder, *words: train(load("tiny.toml", [f"run.folder={folder}", *words]), init=join_quietly)


def test_the_best_checkpoint_by_the_validation_loss_is_kept(
    trained: Any, trained_here: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of this size overshoot: the best is not the last, and each step is evaluated before its save."""
    words = ["checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_best=validation_loss", "train.clip=0"]
    words += ["optimizer.learning_rate=0.3", "optimizer.schedule=constant"]
    done = trained(2, tmp_path / "out", *words, "train.steps=9")
    assert done.returncode == 0, done
    trained_here(tmp_path / "out", *words, "train.steps=30")  # continues where the first ended
    losses = {row["step"]: row["validation_loss"] for row in metrics_of(tmp_path / "out") if "validation_loss" in row}
    assert sorted(losses) == sorted({*range(2, 31, 2), 9})
    best = min(losses, key=lambda step: (losses[step], step))
    assert best != 30, "then this test would show nothing"
    assert checkpoints_of(tmp_path / "out") == [f"step_{best:08d}.h5", "step_00000030.h5"]
    stays = tmp_path / f"out/checkpoints/step_{best:08d}.h5"
    assert f"best checkpoint  {stays} (by validation_loss)" in capsys.readouterr().out
    with h5py.File(stays) as file:
        assert json.loads(file["train"].attrs["logged.json"])["validation_loss"] == losses[best]


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_full_disk_ends_in_an_error_and_not_in_a_requeue(
    trained: Any, trained_here: Any, comm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint.every=5", "checkpoint.on_error=continue", "train.steps=20"]
    trained_here(tmp_path / "whole", *words)
    size = (tmp_path / "whole/checkpoints/step_00000015.h5").stat().st_size
    with shared_disk(tmp_path / "disk", comm) as disk:
        run = disk.folder / "run"
        disk.leave(size + size // 2)  # enough for the first checkpoint, not for a second
        done = trained(2, run, *words)
        assert _refused(done) == "step_00000020.h5"
        assert "no checkpoint of step 10: rank" in done.stderr and ": cannot write" in done.stderr
        assert "the newest that exists is" in done.stderr and "step_00000005.h5; continuing" in done.stderr
        assert len(metrics_of(run)) == 20 and checkpoints_of(run) == ["step_00000005.h5"]

        signalled = trained(2, run, *words, env={"SIGNAL_AT": "7"})
        # A slow rank learns of the signal one step later.
        last = len(metrics_of(run))
        assert last in (12, 13) and _refused(signalled) == f"step_{last:08d}.h5"
        attempts = receipt_of(run)["attempts"]
        assert [(one["status"], one["failed_saves"]) for one in attempts] == [("failed", 2), ("failed", 1)]

        disk.leave(PLENTY)
        trained_here(run, *words)
        assert receipt_of(run)["status"] == "finished" and "resuming after step 5" in capsys.readouterr().err
        rows = [metrics_of(folder) for folder in (run, tmp_path / "whole")]
        assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]] == list(range(1, 21))
        assert [row["loss"] for row in rows[0]] == pytest.approx([row["loss"] for row in rows[1]], rel=1e-5)


def _refused(done: Any) -> str:
    """Return the name of the checkpoint in the error that ended a job, which must occur once."""
    assert done.returncode == 1 and not done.survivors and "Traceback" not in done.stderr, done
    errors = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: error: ")]
    assert len(errors) == 1 and "bytes are needed" in errors[0] and "bytes are free" in errors[0], done
    found = re.search(r"/(step_[0-9]+\.h5): no space left on device", errors[0])
    assert found, errors
    return found[1]
