"""Fixtures: two versions of hpctrain, each with the files that a module needs, and modulefiles for both systems."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.modules import ModuleSystem, environment_modules, lmod

from hpctrain.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["lmod", "modules"])
def system(request: pytest.FixtureRequest) -> ModuleSystem:
    """Return each module system in turn."""
    return lmod() if request.param == "lmod" else environment_modules()


@pytest.fixture(scope="session")
def pages() -> tuple[str, str]:
    """Return the man page and the bash completion."""
    programs = ("packaging/manpage.py", "packaging/completion.py")
    made = [
        subprocess.run([sys.executable, ROOT / program], cwd=ROOT, capture_output=True, text=True, check=True)
        for program in programs
    ]
    return made[0].stdout, made[1].stdout


@pytest.fixture(scope="session")
def modulepath(tmp_path_factory: pytest.TempPathFactory, pages: tuple[str, str]) -> Path:
    """Return a folder with the modules hpctrain/1.0, which depends on mpi/4, and hpctrain/2.0, and mpi/4 itself."""
    folder = tmp_path_factory.mktemp("modules")
    for version, more in (("1.0", ["--depends-on", "mpi/4"]), ("2.0", [])):
        root = install(tmp_path_factory.mktemp("apps") / version, pages)
        for language, ending in (("lua", ".lua"), ("tcl", "")):
            file = folder / "hpctrain" / f"{version}{ending}"
            words = ["modulefile", language, "--root", str(root), "--version", version, "-o", str(file)]
            assert main([*words, *more]) == 0
    (folder / "mpi").mkdir()
    (folder / "mpi/4").write_text("#%Module1.0\nsetenv TEST_MPI 4\n")
    return folder


def install(root: Path, pages: tuple[str, str]) -> Path:
    """Make the files of ``make install`` without the virtual environment."""
    places = ("share/man/man1/hpctrain.1", "share/bash-completion/completions/hpctrain")
    program = f"#!/bin/sh\necho hpctrain of {root}\n"
    for place, text in (*zip(places, pages), ("bin/hpctrain", program)):
        (root / place).parent.mkdir(parents=True)
        (root / place).write_text(text)
    (root / "bin/hpctrain").chmod(0o755)
    return root
