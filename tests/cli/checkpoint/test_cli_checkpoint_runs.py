"""Folders of runs on the command line: a folder means its newest checkpoint, and its best one is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import call

from hpctrain import checkpoint
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.errors import CheckpointError, UsageError

ACCURACY = {2: 0.5, 4: 0.9, 6: 0.75}


def write(run: Path, **train: Any) -> Path:
    """Write a run whose accuracy and loss peaked in the middle."""
    (run / "checkpoints").mkdir(parents=True)
    for step, accuracy in ACCURACY.items():
        loss = np.array([3.0, 2.0 * step])
        sources = [Source.of("/model/w", np.full(3, float(step))), Source.of("/train/loss", loss)]
        values = {"step": step, "logged.json": json.dumps({"accuracy": accuracy, "loss": 2.0 * step}), **train}
        groups = {"/": {"step": step, "world_size": 1}, "/train": values}
        write_file(run / "checkpoints" / f"step_{step:08d}.h5", sources, groups)
    return run


def file(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}.h5"


def test_best_follows_the_criterion_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", keep_best="accuracy", best="highest")
    assert call("checkpoint", "best", run) == 0 and capsys.readouterr().out == f"{file(run, 4)}\n"
    assert call("checkpoint", "best", run / "checkpoints") == 0 and capsys.readouterr().out == f"{file(run, 4)}\n"
    assert call("checkpoint", "best", run, "--lowest") == 0 and capsys.readouterr().out == f"{file(run, 2)}\n"
    assert call("checkpoint", "best", run, "--by", "loss", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": str(file(run, 2)), "step": 2, "by": "loss", "which": "lowest", "value": 4.0}
    assert (
        call("checkpoint", "best", run, "--by", "loss", "--highest") == 0
        and capsys.readouterr().out == f"{file(run, 6)}\n"
    )
    file(run, 4).write_bytes(file(run, 4).read_bytes()[:-1])
    assert (
        call("checkpoint", "best", run) == 0 and capsys.readouterr().out == f"{file(run, 6)}\n"
    ), "a damaged file is left out"


def test_best_without_a_criterion_is_a_user_error(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    with pytest.raises(UsageError, match="the best .* choose one of accuracy, loss by --by NAME ") as caught:
        call("checkpoint", "best", run)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="no checkpoint holds a finite number called 'acc'; they hold accuracy, loss$"):
        call("checkpoint", "best", run, "--by", "acc")
    with pytest.raises(UsageError, match="is a folder that holds no checkpoint"):
        call("checkpoint", "best", tmp_path)


def test_best_of_the_library_equals_best_of_the_command(tmp_path: Path) -> None:
    run = write(tmp_path / "run", keep_best="accuracy", best="highest")
    assert checkpoint.best(run) == checkpoint.best(str(run / "checkpoints")) == file(run, 4)
    assert checkpoint.best(run, which="lowest") == checkpoint.best(run, by="loss") == file(run, 2)
    assert checkpoint.best(run, by="loss", which="highest") == file(run, 6)
    with pytest.raises(UsageError, match="no folder .*/none: give the folder of a run"):
        checkpoint.best(tmp_path / "none")
    with pytest.raises(UsageError, match="which = 'high': allowed are 'lowest' and 'highest'"):
        checkpoint.best(run, which="high")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is a folder that holds no checkpoint"):
        checkpoint.best(tmp_path)
    with pytest.raises(UsageError, match="do not say which is the best .* choose one of accuracy, loss by --by NAME"):
        checkpoint.best(write(tmp_path / "unjudged"))


def test_ls_marks_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run", keep_best="accuracy", best="highest")
    assert call("checkpoint", "ls", run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" best " in line for line in lines] == [False, True, False]
    assert lines[1].endswith("best  loss 8.0000  accuracy 0.9")
    assert call("checkpoint", "ls", run, "--json") == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(entry["best"], entry["by"], entry["value"]) for entry in entries] == [
        (step == 4, "accuracy", accuracy) for step, accuracy in ACCURACY.items()
    ]
    plain = write(tmp_path / "plain")
    assert call("checkpoint", "ls", plain) == 0 and "best" not in capsys.readouterr().out


def test_a_folder_means_its_newest_valid_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = write(tmp_path / "run"), write(tmp_path / "other")
    file(run, 6).write_bytes(file(run, 6).read_bytes()[:-1])
    assert call("checkpoint", "show", run) == 0
    told = capsys.readouterr()
    assert "step 4, world size 1" in told.out
    assert told.err.splitlines()[-1] == f"{run}: using its newest valid checkpoint, {file(run, 4)}"
    assert call("checkpoint", "diff", run, file(other, 4)) == 0
    assert call("checkpoint", "export", run, "--to", "npz") == 0 and file(run, 4).with_suffix(".npz").exists()
    with pytest.raises(UsageError, match="is a folder that holds no checkpoint; give a step_"):
        call("checkpoint", "show", tmp_path)
    for step in ACCURACY:
        file(run, step).write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints"):
        call("checkpoint", "show", run)


def test_plot_accepts_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run = write(tmp_path / "run")
    assert call("checkpoint", "plot", run, "-o", tmp_path / "loss.png") == 0 and (tmp_path / "loss.png").stat().st_size
    assert "using its newest valid checkpoint" in capsys.readouterr().err


def test_verify_reads_all_files_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run")
    assert call("checkpoint", "verify", run) == 0 and len(capsys.readouterr().out.splitlines()) == 3
    file(run, 6).write_bytes(file(run, 6).read_bytes()[:-1])
    assert call("checkpoint", "verify", run, file(run, 2)) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ok", "ok", "damaged", "ok"]
