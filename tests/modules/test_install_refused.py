"""Refusals of ``make install`` and ``make uninstall``: one line each, before any change."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def made(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make without the files that it would install if it did not stop earlier."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = ["make", "--no-print-directory", *words, "TORCH=/nowhere/torch.whl"]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize(
    "words, said",
    [
        (["MODULES=@/m"], "PREFIX is missing: make install PREFIX=/apps/hpctrain/VERSION"),
        (["PREFIX=@/p"], "MODULES is missing: make install PREFIX=/apps"),
        (["PREFIX=apps", "MODULES=@/m"], f"PREFIX=apps must be an absolute path, as {ROOT}/apps"),
        (["PREFIX=@/p", "MODULES=m"], "MODULES=m must be an absolute path"),
        (["PREFIX=@/file/p", "MODULES=@/m"], "@/file is not a folder"),
        (["PREFIX=@/full", "MODULES=@/m"], "PREFIX=@/full holds something else: use an empty or a new folder"),
        (["PREFIX=@/p;x", "MODULES=@/m"], "PREFIX = '@/p;x': allowed is letters"),
        (["PREFIX=@/p", "MODULES=@/m", "VERSION=a/b"], "VERSION = 'a/b': allowed is letters"),
        (["PREFIX=@/p", "MODULES=@/m", "DEPENDS=a b|c"], "DEPENDS = 'b|c': allowed is letters"),
        (["PREFIX=@/p", "MODULES=@/taken", "VERSION=1"], "@/taken/hpctrain/1 is for another PREFIX: add VERSION="),
        (["PREFIX=@/p", "MODULES=@/m", "MPI=site", "MPICC="], "MPI=site needs mpicc in PATH"),
        (["PREFIX=@/p", "MODULES=@/m", "PYTHON=false"], "hpctrain needs Python 3.11 or newer"),
        (["PREFIX=@/p", "MODULES=@/m", "PYTHON=no-such-python"], "PYTHON=no-such-python does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_any_change(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/others").touch()
    (tmp_path / "taken/hpctrain").mkdir(parents=True)
    (tmp_path / "taken/hpctrain/1").write_text("#%Module1.0\nset root {/apps/other}\n")
    before = sorted(tmp_path.rglob("*"))
    done = made(tmp_path, "install", *(word.replace("@", str(tmp_path)) for word in words))
    assert done.returncode == 2 and sorted(tmp_path.rglob("*")) == before
    first = done.stderr.splitlines()[0]
    assert first.startswith("make install: ")
    # An error repeats only the beginning of a long value.
    begin, _, allowed = said.replace("@", str(tmp_path)).partition("': ")
    assert begin[:50] in first and allowed in first


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    done = made(tmp_path, "install", "PREFIX=/proc/hpctrain", f"MODULES={tmp_path}/m")
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "make install: cannot create /proc/hpctrain" in done.stderr or "cannot write in /proc" in done.stderr


def test_uninstall_removes_only_files_of_install(tmp_path: Path) -> None:
    (tmp_path / "p/bin").mkdir(parents=True)
    done = made(tmp_path, "uninstall", f"PREFIX={tmp_path}/p", f"MODULES={tmp_path}/m")
    assert done.returncode == 2 and "was not created by make install: nothing is removed" in done.stderr
    assert (tmp_path / "p/bin").exists()
    done = made(tmp_path, "uninstall", f"PREFIX={tmp_path}/p")
    assert done.returncode == 2 and "MODULES is missing" in done.stderr
