"""Lock file of a default environment, with versions and hashes: ``make lock`` calls it for each MPI wheel.

pip resolves the packages without installing them. Only names, versions and SHA-256 sums of its
report are kept, without their sources. ``make env LOCKED=1`` installs exactly these.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

OWN = "hpctrain"
# Build requirements in pyproject.toml, so that hpctrain itself is installed without downloads.
BUILDING = ("setuptools", "wheel")
HEAD = """\
# Written by make lock: the environment of make env LOCKED=1 MPI={mpi}, for Python {python} on {system} {machine}.
# Names, versions and SHA-256 sums of the wheels; torch is the build for CPUs, from the index that pip is told of.
"""


def main() -> int:
    """Resolve and write; return pip's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mpi", choices=("mpich", "openmpi"))
    parser.add_argument("torch", help="what pip installs as PyTorch, as torch==2.13.0")
    parser.add_argument("output", type=Path)
    wanted = parser.parse_args()
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    command += [wanted.torch, *BUILDING, f".[{wanted.mpi},dev]"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == 0:
        wanted.output.parent.mkdir(exist_ok=True)
        wanted.output.write_text(head(wanted.mpi) + lines(json.loads(done.stdout)), encoding="utf-8")
    return done.returncode


def head(mpi: str) -> str:
    """Return the header comment, which states the purpose of the file."""
    python = ".".join(platform.python_version_tuple()[:2])
    return HEAD.format(mpi=mpi, python=python, system=platform.system(), machine=platform.machine())


def lines(report: dict[str, Any]) -> str:
    """Return one line per package of pip's report except hpctrain itself, sorted by name."""
    found = []
    for each in report["install"]:
        name, version = each["metadata"]["name"].lower().replace("_", "-"), each["metadata"]["version"]
        if name != OWN:
            digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
            found.append(f"{name}=={version} --hash=sha256:{digest}\n")
    return "".join(sorted(found))


if __name__ == "__main__":
    sys.exit(main())
