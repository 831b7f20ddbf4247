"""``hpctrain data`` as its help describes it, without torch and MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from support.commands import call

from hpctrain.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"document {number}\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    return folder


def test_pack_reports_its_work_and_does_it_once(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "deep" / "out.h5")
    assert call("data", "pack", str(corpus), "-o", out, "--validation-fraction", "0.2") == 0
    said = capsys.readouterr().out
    with h5py.File(out) as file:
        train, validation = (len(file[split]["tokens"]) for split in ("train", "validation"))
    assert f"packed {train} train tokens" in said and f"{validation} validation tokens" in said
    assert f"into {out}; files skipped (not text): 1" in said
    assert call("data", "pack", str(corpus), "-o", out, "--validation-fraction", "0.2") == 0
    assert capsys.readouterr().out == f"{out} is up to date: same corpus, same options\n"
    with pytest.raises(DataError, match="--force replaces it"):
        call("data", "pack", str(corpus), "-o", out)
    assert call("data", "pack", str(corpus), "-o", out, "--force", "--seed", "3") == 0


def test_show_prints_text_or_json(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.h5")
    call("data", "pack", str(corpus), "-o", out)
    capsys.readouterr()
    assert call("data", "show", out) == 0
    assert "hpctrain-tokens" in capsys.readouterr().out
    assert call("data", "show", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 256


def test_show_refuses_a_damaged_file(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.h5"
    call("data", "pack", str(corpus), "-o", str(out))
    with h5py.File(out, "r+") as file:
        file["validation/tokens"][0] = 0
    with pytest.raises(DataError, match="is damaged: wrong checksum of /validation/tokens"):
        call("data", "show", str(out))
    assert "damaged" in capsys.readouterr().out


def test_a_full_disk_is_one_line_of_error(corpus: Path, tmp_path: Path) -> None:
    (corpus / "long.txt").write_text("once upon a time " * 10_000)
    code = f"""
import resource
from hpctrain.data.pack import pack
from hpctrain.errors import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    pack([{str(corpus)!r}], {str(tmp_path / "x.h5")!r})
except DataError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"cannot write {tmp_path / 'x.h5'}: File too large\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_neither_action_loads_torch_or_mpi(corpus: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from hpctrain.cli.main import main
print([name for name in ("numpy", "h5py", "torch", "mpi4py") if name in sys.modules])
for words in (["pack", {str(corpus)!r}, "-o", {str(tmp_path / "x.h5")!r}], ["show", {str(tmp_path / "x.h5")!r}]):
    assert main(["data", *words]) == 0
print([name for name in ("torch", "mpi4py") if name in sys.modules])
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == said[-1] == "[]"
