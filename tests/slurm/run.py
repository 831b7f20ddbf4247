"""Runner of the tests that submit jobs to a real Slurm; each worker has a cluster of its own (private_slurm.py).

    python tests/slurm/run.py                  all of them
    python tests/slurm/run.py -k PATTERN       words for pytest

Needs root and Debian's packages of Slurm. With `--or-skip`, a machine without them prints the reason and exits with 0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import slurm_needs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORKERS = 4  # jobs mostly wait: for a time limit, for the detection of a dead node, for their restart


def main() -> int:
    """Run the tests and return their exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--or-skip", action="store_true", help="exit with 0 where this machine cannot run Slurm")
    args, words = parser.parse_known_args()
    if reason := slurm_needs.obstacle() or _without_environment():
        print(f"{'skipped' if args.or_skip else 'error'}: tests with Slurm: {reason}")
        return 0 if args.or_skip else 1
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "slurm and not ecosystem",
        "-n",
        str(WORKERS),
        "--durations=0",
        str(HERE),
        *words,
    ]
    return subprocess.run(command, cwd=ROOT).returncode


def _without_environment() -> str | None:
    """Return the environment of the project that is missing; jobs run with both."""
    missing = [mpi for mpi, venv in slurm_needs.VENVS.items() if not (venv / "bin" / "hpctrain").exists()]
    return f"make env MPI={missing[0]} comes first" if missing else None


if __name__ == "__main__":
    sys.exit(main())
