"""Checkpoint verbs: text and JSON output, and the documented exit codes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.commands import Terminal, call

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.cli.checkpoint_files import progress
from hpctrain.errors import CheckpointError, UsageError


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (3, 40):
        sources = [
            Source.of("/model/head.weight", np.array([[1.5, -2.0], [np.inf, 4.0]], dtype="<f4")),
            Source.of("/model/scale", np.array(0.25, dtype="<f8")),
            Source.of("/model/none", np.empty((0, 3), dtype="<f4")),
            Source.of("/optimizer/head.weight/exp_avg", np.zeros((40, 2), dtype="<f4")),
            Source.of("/train/step", np.arange(1, 9)),
            Source.of("/train/loss", np.linspace(5.5, 2.0, 8)),
        ]
        groups = {
            "/": {"step": step, "world_size": 2},
            "/train": {"step": step, "sampler.json": '{"seed": 3}'},
            "/provenance": {"host": "node\x1b[31m7"},
            "/config": {"toml": "[train]\nsteps = 40\n"},
        }
        write_file(folder / f"step_{step:08d}.h5", sources, groups)
    return tmp_path


def damage(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(np.float32(1.5).tobytes() + np.float32(-2).tobytes(), bytes(8)))


def test_ls_lists_checkpoints(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run_folder / "checkpoints" / "step_00000040.h5"
    newest.write_bytes(newest.read_bytes()[:-5])
    assert call("checkpoint", "ls", run_folder) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step_00000003.h5") and "step 3" in first and "2 ranks" in first and "loss 2.0000" in first
    assert second.startswith("step_00000040.h5") and "damaged: " in second and "truncated" in second
    assert call("checkpoint", "ls", run_folder / "checkpoints", "--json") == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["step"] for entry in entries] == [3, 40] and entries[0]["error"] is None and entries[0]["loss"] == 2.0
    newest.unlink(), (run_folder / "checkpoints" / "step_00000003.h5").unlink()
    assert call("checkpoint", "ls", run_folder) == 0 and "no checkpoints in" in capsys.readouterr().out


def test_show_prints_a_checkpoint(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_folder / "checkpoints" / "step_00000003.h5"
    assert call("checkpoint", "show", path) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["loss", "5.5", "█▇▆▅▄▃▂▁", "2"] in lines
    assert ["head.weight", "float32", "2x2", "min", "-2", "max", "4", "norm", "4.717", "1", "not", "finite"] in lines
    assert ["scale", "float64", "scalar", "0.25"] in lines and ["none", "float32", "0x3", "empty"] in lines
    assert ["sampler", '{"seed":', "3}"] in lines and ["steps", "=", "40"] in lines
    assert re.search(r"^fingerprint [0-9a-f]{16}$", out, re.MULTILINE)
    assert "4 tensors, 344 B" in out and "world size 2" in out
    assert "\x1b" not in out and "node\\x1b[31m7" in out


def test_show_leaves_out_curves_that_the_run_has_not_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step_00000002.h5"
    curves = {"step": [1.0, 2.0], "loss": [np.nan, np.nan], "learning_rate": [np.nan, np.nan], "grad_norm": [np.nan, 3]}
    sources = [Source.of(f"/train/{name}", np.array(values)) for name, values in curves.items()]
    groups = {"/": {"step": 2, "world_size": 1}, "/train": {"step": 2, "logged.json": '{"loss": null}'}}
    write_file(path, sources, groups)
    assert call("checkpoint", "show", path) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["loss", "nan", "nan"] in lines
    assert any(line[:2] == ["grad", "norm"] for line in lines)
    assert not any(line[:2] == ["learning", "rate"] for line in lines)


def test_show_of_a_named_tensor(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_folder / "checkpoints" / "step_00000003.h5"
    assert call("checkpoint", "show", path, "head.weight") == 0
    out = capsys.readouterr().out
    assert "1.5, -2, inf, 4" in out and "/optimizer/head.weight" in out and "provenance" not in out
    with pytest.raises(UsageError, match="did you mean head.weight"):
        call("checkpoint", "show", path, "head.wieght")


def test_show_json_is_valid_json(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("checkpoint", "show", run_folder / "checkpoints" / "step_00000003.h5", "head.weight", "--json") == 0

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    shown = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert shown["tensors"][0]["values"] == [1.5, -2.0, None, 4.0] and shown["tensors"][0]["nonfinite"] == 1
    assert shown["root"]["step"] == 3 and shown["curves"]["loss"][0] == 5.5


def test_show_of_a_damaged_file_is_an_error(run_folder: Path) -> None:
    path = run_folder / "checkpoints" / "step_00000003.h5"
    damage(path)
    with pytest.raises(CheckpointError, match="/model/head.weight is damaged") as caught:
        call("checkpoint", "show", path)
    assert caught.value.exit_code == 2


def test_verify_reports_damage(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = sorted((run_folder / "checkpoints").iterdir())
    assert call("checkpoint", "verify", good, bad) == 0
    assert capsys.readouterr().out == f"ok       {good}\nok       {bad}\n"
    damage(bad)
    assert call("checkpoint", "verify", bad, good) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"damaged  {bad}: /model/head.weight is damaged") and second == f"ok       {good}"
    assert call("checkpoint", "verify", good, bad, "--json") == 1
    verdicts = json.loads(capsys.readouterr().out)
    assert [(verdict["file"], verdict["ok"]) for verdict in verdicts] == [(str(good), True), (str(bad), False)]
    assert "/model/head.weight" in verdicts[1]["error"]


def test_a_missing_file_is_a_user_error(run_folder: Path) -> None:
    with pytest.raises(UsageError, match=f"no such file: {run_folder / 'none.h5'}") as caught:
        call("checkpoint", "verify", run_folder / "none.h5")
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="is not a folder"):
        call("checkpoint", "ls", run_folder / "none")


def test_a_progress_bar_is_shown_only_on_a_terminal_and_for_large_files(run_folder: Path) -> None:
    path = run_folder / "checkpoints" / "step_00000003.h5"
    for stream, big, shown in ((io.StringIO(), 1, False), (Terminal(), 2**20, False), (Terminal(), 1, True)):
        with progress([path], big, stream) as on_bytes:
            if on_bytes is not None:
                on_bytes(10)
        assert ("reading" in stream.getvalue()) is shown
