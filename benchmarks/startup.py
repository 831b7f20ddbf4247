"""Time of a job from `mpiexec` to its first step, compared with the unavoidable minimum.

The ideal is the sum of two measurements in the same run: concurrent `import torch` in one
process per rank, and MPI's own start (`mpiexec` to a first barrier). The job is a user's script
with the public API: init, wrap, run; it writes into a temporary folder. The candidates are
interleaved.

    python benchmarks/startup.py --ranks 2 --rounds 7
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import provenance, summary, table, write

TARGET = 1.15

MPI_START = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"
JOB = """
import time
import hpctrain
job = hpctrain.init(device="cpu")
import torch
model = job.wrap(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.ones(8, 64)] * 2
with job.run(model, optimizer, batches, checkpoints={folder!r}) as run:
    for step, batch in run:
        if step == 1 and job.rank == 0:
            print("begun", time.time(), flush=True)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and job.rank == 0:
            print("ended", time.time(), flush=True)
"""


def main() -> None:
    """Run the benchmark, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    launcher = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(args.ranks), sys.executable]
    names = ("import torch", "MPI start", "first step begun", "first step ended")
    measured: dict[str, list[float]] = {name: [] for name in names}
    for number in range(args.rounds + 1):
        imports = concurrent_imports(args.ranks)
        start = timed(lambda: run([*launcher, "-c", MPI_START]))
        begun, ended = first_step(launcher)
        if number:  # the first round warms the file cache
            for name, value in zip(measured, (imports, start, begun, ended)):
                measured[name].append(value)
    report(measured, args)


def concurrent_imports(ranks: int) -> float:
    """Return the seconds of concurrent imports of torch, in one process per rank."""
    started = time.time()
    processes = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(ranks)]
    for process in processes:
        if process.wait(120):
            raise SystemExit("import torch failed")
    return time.time() - started


def first_step(launcher: Sequence[str]) -> tuple[float, float]:
    """Return the seconds from the launcher to the begin and the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        output = run([*launcher, "-c", JOB.format(folder=folder)])
    marks = dict(line.split() for line in output.splitlines() if line.startswith(("begun", "ended")))
    return float(marks["begun"]) - started, float(marks["ended"]) - started


def run(command: Sequence[str]) -> str:
    """Run a command to its end and return its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ... failed:\n{done.stderr}")
    return done.stdout


def timed(action: Callable[[], object]) -> float:
    """Return the duration of an action, in seconds."""
    started = time.time()
    action()
    return time.time() - started


def report(measured: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Print the ratio first, then the times; write all of it."""
    times = {name: summary(values) for name, values in measured.items()}
    ideal = times["import torch"]["median"] + times["MPI start"]["median"]
    ratio = times["first step begun"]["median"] / ideal
    print(f"first step begun / (import torch + MPI start)   {ratio:.3f}   (target: at most {TARGET})\n")
    rows = [["", "median s", "min", "max"]]
    rows += [[name, *(f"{time[key]:.2f}" for key in ("median", "min", "max"))] for name, time in times.items()]
    print(table(rows))
    content = {
        "benchmark": "startup",
        "ratio": ratio,
        "seconds": times,
        "provenance": {**provenance(args.ranks, "see command"), "command": " ".join(["python", *sys.argv])},
    }
    print(f"written to {write(f'startup-np{args.ranks}', content)}")


if __name__ == "__main__":
    main()
