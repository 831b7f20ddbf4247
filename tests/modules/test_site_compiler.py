"""The compiler of MPI=site is tried before mpi4py is built with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "packaging" / "check_mpicc.sh"
FOUND = """#!/bin/sh
cat >{folder}/source
echo "$@" >{folder}/words
"""


def tried(mpicc: str) -> tuple[int, str]:
    environ = {"MPICC": mpicc, "PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    done = subprocess.run([PROGRAM], env=environ, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_a_compiler_gets_a_program_of_mpi(tmp_path: Path) -> None:
    path = tmp_path / "mpicc"
    path.write_text(FOUND.format(folder=tmp_path))
    path.chmod(0o755)
    assert tried(f"{path} -O1") == (0, "")
    assert "#include <mpi.h>" in (tmp_path / "source").read_text()
    assert (tmp_path / "words").read_text().startswith("-O1 -x c ")


def test_what_a_compiler_lacks_is_one_line(tmp_path: Path) -> None:
    code, said = tried(f"{tmp_path}/none")
    assert code == 1 and said.count("\n") == 1 and "not found" in said


@pytest.mark.skipif(not shutil.which("cc", path="/usr/bin:/bin"), reason="needs a C compiler")
def test_a_missing_header_is_named(tmp_path: Path) -> None:
    code, said = tried(f"cc -nostdinc -I{tmp_path}")
    assert code == 1 and said.count("\n") == 1 and "mpi.h" in said and "libopenmpi-dev" in said
