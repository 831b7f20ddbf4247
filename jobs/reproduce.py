"""Trainer of one run on several numbers of ranks and strategies, which compares the fingerprints: make reproduce.

    python jobs/reproduce.py hpctrain train jobs/gpt-tiny.toml --set data.files=runs/gpt-tiny.h5

Every run starts anew, with parallel.reproducible = true and one thread per rank. A fingerprint covers all weights and
moments. Environment: MPIEXEC is the launcher ("mpiexec"; "srun" in a job), STEPS the number of steps (100).
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = ((1, "ddp"), (2, "ddp"), (3, "zero1"), (4, "fsdp"))  # ranks and strategies
HEADINGS = ("ranks", "strategy", "loss", "seconds", "fingerprint")


def train(command, ranks, strategy, folder, steps):
    """Run the command on a number of ranks; return the last row of its metrics."""
    launcher = shlex.split(os.environ.get("MPIEXEC", "mpiexec"))
    settings = {
        "run.folder": folder,
        "run.oversubscribe": "true",
        "train.steps": steps,
        "train.prompt": '""',
        "parallel.data": strategy,
        "parallel.reproducible": "true",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "-n", str(ranks), *command, *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nthe run on {ranks} ranks has failed with exit code {done.returncode}")
    return json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])


def main(command):
    """Print one line per run, and whether all fingerprints are equal; return the exit code."""
    steps = os.environ.get("STEPS") or "100"
    print(f"{steps} steps of {' '.join(command)}", flush=True)
    print("{:>5}  {:8}  {:>8}  {:>7}  {}".format(*HEADINGS), flush=True)
    found = set()
    for ranks, strategy in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            row = train(command, ranks, strategy, f"{folder}/run", steps)
        found.add(row["fingerprint"])
        seconds = time.monotonic() - began
        print(f"{ranks:5}  {strategy:8}  {row['loss']:8.5f}  {seconds:7.1f}  {row['fingerprint']}", flush=True)
    if len(found) > 1:
        print(f"{len(found)} different fingerprints: the runs are not reproducible on this machine")
        return 1
    print("all fingerprints agree: every bit of the weights and moments is the same")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else "usage: python jobs/reproduce.py hpctrain train FILE ...")
