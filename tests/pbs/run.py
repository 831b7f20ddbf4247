"""Run the tests that submit jobs to OpenPBS, whose nodes this machine plays; see pbs_cluster.py.

    OPENPBS=FOLDER python tests/pbs/run.py                  all but the long ones
    OPENPBS=FOLDER python tests/pbs/run.py --long           the long ones, without and with ssh between nodes
    OPENPBS=FOLDER python tests/pbs/run.py -k PATTERN       words for pytest

Needs root, and a folder with OpenPBS and its script. `--or-skip` says why and ends well where the machine cannot do it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pbs_needs

HERE = Path(__file__).resolve().parent
WORKERS = 2  # jobs wait most of the time; more would share three nodes of two cores


def main() -> int:
    """Return the exit code of the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--or-skip", action="store_true", help="exit with 0 where this machine cannot run OpenPBS")
    parser.add_argument("--long", action="store_true", help="the sweeps that take half an hour")
    args, words = parser.parse_known_args()
    if reason := pbs_needs.obstacle():
        print(f"{'skipped' if args.or_skip else 'error'}: tests with OpenPBS: {reason}")
        return 0 if args.or_skip else 1
    kinds = [False, True] if args.long else [False]
    return max(_run(ssh, "pbs and long" if args.long else "pbs and not long", words) for ssh in kinds)


def _run(ssh: bool, marks: str, words: list[str]) -> int:
    """Start the cluster, run tests, and end the cluster however they end."""
    from pbs_cluster import FOLDER, PbsCluster
    from user_environments import prepare

    cluster = PbsCluster(ssh=ssh)
    try:
        cluster.start()
        prepare(FOLDER)
        command = [sys.executable, "-m", "pytest", "-m", marks, "-n", str(WORKERS), "--durations=0", str(HERE), *words]
        environment = {**os.environ, "HPCTRAIN_PBS_SSH": "yes" if ssh else "no"}
        return subprocess.run(command, cwd=pbs_needs.ROOT, env=environment).returncode
    finally:
        cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
