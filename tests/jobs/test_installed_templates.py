"""Templates and profiles in plain and in editable installations."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("jobs/slurm/*.in", "jobs/pbs/*.in", "jobs/profiles/*.toml", "jobs/*.toml", "modules/*.in")
    for path in ROOT.glob(pattern)
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the content of a wheel of hpctrain."""
    pytest.importorskip("setuptools.build_meta")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hpctrain", source / "hpctrain", symlinks=True, ignore=ignored)
    for folder in ("benchmarks", "docs", "jobs", "modules"):
        shutil.copytree(ROOT / folder, source / folder)
    code = "import setuptools.build_meta as build; build.build_wheel('.')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_the_number_of_shipped_files_is_known() -> None:
    assert len(SHIPPED) == 23


def test_a_wheel_contains_the_shipped_files(installed: Path) -> None:
    for name in SHIPPED:
        packaged = name.replace("jobs/", "templates/", 1)
        assert (installed / "hpctrain/jobs" / packaged).read_bytes() == (ROOT / name).read_bytes()
    assert not (installed / "jobs").exists()
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks/harness").glob("*.py")]
    assert all((installed / "hpctrain" / program.relative_to(ROOT)).is_file() for program in programs)
    for page in (ROOT / "docs").glob("*.md"):
        assert (installed / "hpctrain/docs" / page.name).read_bytes() == page.read_bytes()


@pytest.mark.parametrize("where", ["installed", "editable"])
def test_shipped_files_are_found(where: str, installed: Path, tmp_path: Path) -> None:
    home = installed if where == "installed" else ROOT
    code = (
        "import hpctrain; from hpctrain.cli.main import main; print(hpctrain.__file__); "
        "main(['job', 'pbs', 'a.toml', '--time', '01:00:00', '--profile', 'derecho', '--venv', 'none']); "
        "main(['modulefile', 'tcl', '--root', '/apps/x', '-o', 'x'])"
    )
    (tmp_path / "a.toml").write_text("")
    environment = {"PYTHONPATH": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{home}/hpctrain/__init__.py\n#!/bin/bash -l\n#PBS -N a\n")
    assert (tmp_path / "x").read_text().startswith("#%Module1.0\n# hpctrain 0")
