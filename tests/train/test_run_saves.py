"""Whole jobs and their checkpoints: the best one stays, a full disk is an error, a second run takes a model over."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest
from support.corpus import make_project
from support.disks import PLENTY, shared_disk
from support.life import checkpoints_of, metrics_of, receipt_of

from hpctrain.errors import HpctrainError
from hpctrain.train import guard
from hpctrain.train.run import train
from hpctrain.train.settings import load

HPCTRAIN = "import sys; from hpctrain.cli.main import main; sys.exit(main())\n"


@pytest.fixture
def trained(launch: Any, tmp_path: Path) -> Any:
    """Return a function that runs ``hpctrain train`` with the words as settings."""
    config = make_project(tmp_path)

    def run(n: int, folder: Path, *words: str, env: dict[str, str] = {}) -> Any:
        settings = [part for word in (f"run.folder={folder}", *words) for part in ("--set", word)]
        return launch(n, HPCTRAIN, "train", config, *settings, cwd=tmp_path, env=env, timeout=60)

    return run


@pytest.fixture
def trained_here(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that does in this process, which has torch, what ``trained(0, ...)`` does in another."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "bytes_model", raising=False)
    monkeypatch.setattr(guard, "Guard", lambda transport: SimpleNamespace(step=None, close=lambda: None))
    return lambda folder, *words: train(load("tiny.toml", [f"run.folder={folder}", *words]))


def test_the_best_by_the_validation_loss_stays(trained: Any, tmp_path: Path) -> None:
    """Steps of this size overshoot: the best is not the last, and each saved step was evaluated before its save."""
    words = ["checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_best=validation_loss", "train.clip=0"]
    words += ["optimizer.learning_rate=0.3", "optimizer.schedule=constant"]
    for ranks, steps in ((2, 9), (0, 30)):  # the second goes on where the first ended
        done = trained(ranks, tmp_path / "out", *words, f"train.steps={steps}")
        assert done.returncode == 0, done
    losses = {row["step"]: row["validation_loss"] for row in metrics_of(tmp_path / "out") if "validation_loss" in row}
    assert sorted(losses) == sorted({*range(2, 31, 2), 9})
    best = min(losses, key=lambda step: (losses[step], step))
    assert best != 30, "then this test would show nothing"
    assert checkpoints_of(tmp_path / "out") == [f"step_{best:08d}.h5", "step_00000030.h5"]
    assert f"best checkpoint  {tmp_path / 'out/checkpoints'}/step_{best:08d}.h5 (by validation_loss)" in done.stdout
    with h5py.File(tmp_path / f"out/checkpoints/step_{best:08d}.h5") as file:
        assert json.loads(file["train"].attrs["logged.json"])["validation_loss"] == losses[best]


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_full_disk_ends_in_an_error_and_not_in_a_requeue(
    trained: Any, trained_here: Any, comm: Any, tmp_path: Path
) -> None:
    words = ["checkpoint.every=5", "checkpoint.on_error=continue", "train.steps=20"]
    trained_here(tmp_path / "whole", *words)
    size = (tmp_path / "whole/checkpoints/step_00000015.h5").stat().st_size
    with shared_disk(tmp_path / "disk", comm) as disk:
        run = disk.folder / "run"
        disk.leave(size + size // 2)  # for the first, not for a second
        done = trained(2, run, *words)
        assert _refused(done) == "step_00000020.h5"
        assert "no checkpoint of step 10: rank" in done.stderr and ": cannot write" in done.stderr
        assert "the newest that exists is" in done.stderr and "step_00000005.h5; going on" in done.stderr
        assert len(metrics_of(run)) == 20 and checkpoints_of(run) == ["step_00000005.h5"]

        signalled = trained(2, run, *words, env={"SIGNAL_AT": "7"})
        assert _refused(signalled) == "step_00000012.h5" and len(metrics_of(run)) == 12
        attempts = receipt_of(run)["attempts"]
        assert [(one["status"], one["failed_saves"]) for one in attempts] == [("failed", 2), ("failed", 1)]

        disk.leave(PLENTY)
        again = trained(2, run, *words)
        assert again.returncode == 0 and "resuming after step 5" in again.stderr, again
        rows = [metrics_of(folder) for folder in (run, tmp_path / "whole")]
        assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]] == list(range(1, 21))
        assert [row["loss"] for row in rows[0]] == pytest.approx([row["loss"] for row in rows[1]], rel=1e-5)


def _refused(done: Any) -> str:
    """Return the name of the checkpoint for which a job ended in an error, said once."""
    assert done.returncode == 2 and not done.survivors and "Traceback" not in done.stderr, done
    errors = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: error: ")]
    assert len(errors) == 1 and "bytes are needed" in errors[0] and "bytes are free" in errors[0], done
    found = re.search(r"/(step_[0-9]+\.h5): no space left on device", errors[0])
    assert found, errors
    return found[1]


def test_a_run_from_another_runs_model(trained: Any, trained_here: Any, tmp_path: Path) -> None:
    first = tmp_path / "first/checkpoints/step_00000030.h5"
    trained_here(tmp_path / "first", "train.steps=30")
    done = trained(2, tmp_path / "second", "train.steps=3", f"train.start_from={first}", "optimizer.learning_rate=0")
    assert done.returncode == 0 and f"starting from the model of {first}, written after step 30" in done.stderr, done
    losses = [[row["loss"] for row in metrics_of(tmp_path / name)] for name in ("first", "second")]
    assert losses[1][0] < losses[0][0] - 0.3, "the model had learnt something"
    with pytest.raises(HpctrainError, match="does not fit this program") as refused:
        trained_here(tmp_path / "third", f"train.start_from={first}", "model.options.width=16")
    assert refused.value.exit_code == 2 and "embedding.weight" in str(refused.value)
    assert not (tmp_path / "third").exists()
