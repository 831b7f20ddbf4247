"""Run the tests that submit jobs to a real Slurm, each worker to one of its own; see private_slurm.py.

    python tests/slurm/run.py                  all of them
    python tests/slurm/run.py -k PATTERN       words for pytest

Needs root, and Debian's packages of Slurm. `--or-skip` says why and ends well where the machine cannot do that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import slurm_needs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORKERS = 4  # jobs wait most of the time: for the end of a limit, for a node to be missed, to be started again


def main() -> int:
    """Return the exit code of the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--or-skip", action="store_true", help="exit with 0 where this machine cannot run Slurm")
    args, words = parser.parse_known_args()
    if reason := slurm_needs.obstacle() or _without_environment():
        print(f"{'skipped' if args.or_skip else 'error'}: tests with Slurm: {reason}")
        return 0 if args.or_skip else 1
    command = [sys.executable, "-m", "pytest", "-m", "slurm", "-n", str(WORKERS), "--durations=0", str(HERE), *words]
    return subprocess.run(command, cwd=ROOT).returncode


def _without_environment() -> str | None:
    """Return which environment of the project is missing; jobs run with both."""
    missing = [mpi for mpi, venv in slurm_needs.VENVS.items() if not (venv / "bin" / "hpctrain").exists()]
    return f"make env MPI={missing[0]} comes first" if missing else None


if __name__ == "__main__":
    sys.exit(main())
