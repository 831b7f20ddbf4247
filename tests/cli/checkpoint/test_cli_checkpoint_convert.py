"""Verbs ``export``, ``import`` and ``plot``: the files that they write, and where."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import call

from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.errors import UsageError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step_00000003.h5"
    curves = [Source.of("/train/step", np.arange(1, 4)), Source.of("/train/loss", np.array([3.0, 2.0, 1.5]))]
    write_file(path, [Source.of("/model/w", np.arange(6.0)), *curves], {"/": {"step": 3, "world_size": 1}})
    return path


def test_export_writes_next_to_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("checkpoint", "export", file, "--to", "npz") == 0
    assert capsys.readouterr().out.startswith(f"{file.with_suffix('.npz')}  ")
    with np.load(file.with_suffix(".npz")) as loaded:
        assert set(loaded) == {"model/w", "train/step", "train/loss"}
    with pytest.raises(UsageError, match="exists"):
        call("checkpoint", "export", file, "--to", "npz")
    assert call("checkpoint", "export", file, "--to", "npz", "--model-only", "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 1
    with np.load(file.with_suffix(".npz")) as loaded:
        assert loaded["w"].tolist() == list(range(6))


def test_an_input_is_never_replaced_by_its_output(file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    link = tmp_path / "other.h5"
    link.symlink_to(file)
    for read in (file, link):
        with pytest.raises(UsageError, match="is the input file: choose another name"):
            call("checkpoint", "export", read, "--to", "npz", "-o", file, "--force")
    call("checkpoint", "export", file, "--to", "npz", "-o", link, "--force")  # replaces the link
    assert file.read_bytes() == before and not link.is_symlink()
    with pytest.raises(UsageError, match="the name of the output is empty"):
        call("checkpoint", "export", file, "--to", "npz", "-o", "")
    call("checkpoint", "export", file, "--to", "torch", "-o", tmp_path / "model.pt")
    with pytest.raises(UsageError, match="is the input file"):
        call("checkpoint", "import", tmp_path / "model.pt", "-o", tmp_path / "model.pt", "--force")
    assert file.read_bytes() == before


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_best_of_a_path_that_is_not_a_folder_is_a_user_error(file: Path, tmp_path: Path, kind: str) -> None:
    with pytest.raises(UsageError, match="is not a folder: give the folder of a run"):
        call("checkpoint", "best", file if kind == "file" else tmp_path / "missing")


def test_import_of_an_exported_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, suffix in (("safetensors", "safetensors"), ("torch", "pt")):
        assert call("checkpoint", "export", file, "--to", kind, "--model-only", "-o", tmp_path / f"m.{suffix}") == 0
        back = tmp_path / f"{kind}.h5"
        assert call("checkpoint", "import", tmp_path / f"m.{suffix}", "-o", back, "--step", 5) == 0
        assert f"{back}  " in capsys.readouterr().out
        with Reader(back) as reader:
            assert reader.read("/model/w").tolist() == list(range(6)) and reader.root["step"] == 5
    torch.save({"p.w": torch.ones(1)}, tmp_path / "p.pt")
    assert call("checkpoint", "import", tmp_path / "p.pt", "-o", tmp_path / "p.h5", "--strip", "p.", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 1


def test_plot_writes_an_image(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert call("checkpoint", "plot", file, "-o", tmp_path / "loss.png", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": str(tmp_path / "loss.png"),
        "bytes": (tmp_path / "loss.png").stat().st_size,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "{folder}"],
        ["show", "{file}"],
        ["verify", "{file}"],
        ["diff", "{file}", "{file}"],
        ["export", "{file}", "--to", "safetensors", "-o", "{folder}/x.safetensors"],
        ["export", "{file}", "--to", "npz", "-o", "{folder}/x.npz"],
        ["import", "{folder}/in.safetensors", "-o", "{folder}/x.h5"],
        ["plot", "{file}", "-o", "{folder}/x.png"],
    ],
    ids=lambda arguments: " ".join(arguments[:4:3]),
)
def test_a_login_node_needs_neither_torch_nor_mpi(file: Path, tmp_path: Path, arguments: list[str]) -> None:
    """Both are made impossible to import, so that any attempt fails."""
    call("checkpoint", "export", file, "--to", "safetensors", "-o", tmp_path / "in.safetensors")
    words = [word.format(file=file, folder=tmp_path) for word in arguments]
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['mpi4py'] = None\n"
        "from hpctrain.cli.main import main\nsys.exit(main(['checkpoint', *sys.argv[1:]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
