"""Runner of the tests that submit jobs to OpenPBS, whose nodes are namespaces of this machine (pbs_cluster.py).

    OPENPBS=FOLDER python tests/pbs/run.py                  all but the long ones
    OPENPBS=FOLDER python tests/pbs/run.py --long           the long ones, without and with ssh between nodes
    OPENPBS=FOLDER python tests/pbs/run.py -k PATTERN       words for pytest

Needs root, and a folder with OpenPBS and its script. Without OPENPBS, jobs go to the PBS of this machine if it is a
login node; tests that kill nodes are then skipped. With `--or-skip`, a machine with neither prints the reason and exits
with 0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pbs_needs

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # where the package support is
WORKERS = 2  # jobs mostly wait; more workers would share three nodes of two cores


def main() -> int:
    """Run the tests and return their exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--or-skip", action="store_true", help="exit with 0 where this machine cannot run OpenPBS")
    parser.add_argument("--long", action="store_true", help="the sweeps that take half an hour")
    args, words = parser.parse_known_args()
    if reason := pbs_needs.obstacle():
        print(f"{'skipped' if args.or_skip else 'error'}: tests with OpenPBS: {reason}")
        return 0 if args.or_skip else 1
    kinds = ["site"] if pbs_needs.script() is None else ["tmrsh", "ssh"] if args.long else ["tmrsh"]
    return max(_run(kind, "pbs and long" if args.long else "pbs and not long", words) for kind in kinds)


def _run(kind: str, marks: str, words: list[str]) -> int:
    """Start the cluster, run the tests, and stop the cluster in any case."""
    from pbs_cluster import PbsCluster
    from site_pbs import SitePbs
    from user_environments import prepare

    cluster = SitePbs() if kind == "site" else PbsCluster(ssh=kind == "ssh")
    try:
        cluster.start()
        if kind != "site":
            prepare(cluster.folder)
        command = [sys.executable, "-m", "pytest", "-m", marks, "-n", str(WORKERS), "--durations=0", str(HERE), *words]
        environment = {**os.environ, "HPCTRAIN_PBS": kind}
        return subprocess.run(command, cwd=pbs_needs.ROOT, env=environment).returncode
    finally:
        cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
