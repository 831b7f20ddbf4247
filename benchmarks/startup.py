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
from collections.abc import Sequence

from harness.ranks import end_child, mpiexec, refuse, run_child
from harness.report import at_most, table, target_table
from harness.run import finish, main, make_parser
from harness.stats import summary
from harness.turns import interleave, stop

TARGET = 1.15
LONGEST = 120.0  # seconds that a process may take
IMPORT, START, FIRST = "import torch", "MPI start", "first step"
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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("startup", __doc__, rounds=7, quick=False)
    parser.add_argument("--ranks", type=int, default=2)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    launcher = [*mpiexec(args.ranks), sys.executable]
    turns = {
        IMPORT: lambda _: [concurrent_imports(args.ranks)],
        START: lambda _: [mpi_start(launcher)],
        FIRST: lambda _: list(first_step(launcher)),
    }
    measured = interleave(turns, args.rounds, what="rounds")  # the first round warms the file cache
    values = {name: [each[0] for each in measured[name]] for name in (IMPORT, START)}
    for place, name in enumerate(("first step begun", "first step ended")):
        values[name] = [each[place] for each in measured[FIRST]]
    times = {name: summary(each) for name, each in values.items() if each}
    ratio = None
    if len(times) == len(values):
        ratio = times["first step begun"]["median"] / (times[IMPORT]["median"] + times[START]["median"])
    found = list(at_most(f"first step begun / ({IMPORT} + {START})", ratio, TARGET))
    rows = [["", "median s", "min", "max"]]
    rows += [[name, *(f"{time[key]:.2f}" for key in ("median", "min", "max"))] for name, time in times.items()]
    content, lines = {"ratio": ratio, "seconds": times}, [target_table(found), table(rows)]
    finish(args, "startup", content, lines, file=f"startup-np{args.ranks}", ranks=args.ranks, found=found)


def concurrent_imports(ranks: int) -> float:
    """Return the seconds of concurrent imports of torch, in one process per rank."""
    command = [sys.executable, "-c", "import torch"]
    started = time.time()
    processes = [subprocess.Popen(command, text=True, start_new_session=True) for _ in range(ranks)]
    try:
        while None in [process.poll() for process in processes]:
            stop.check()
            time.sleep(0.002)
        seconds = time.time() - started
    finally:
        for process in processes:
            end_child(process)
    if any(process.returncode for process in processes):
        refuse("import torch failed")
    return seconds


def mpi_start(launcher: Sequence[str]) -> float:
    """Return the seconds from the launcher to the end of a job that only starts MPI."""
    started = time.time()
    output(launcher, MPI_START)
    return time.time() - started


def first_step(launcher: Sequence[str]) -> tuple[float, float]:
    """Return the seconds from the launcher to the begin and the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        text = output(launcher, JOB.format(folder=folder))
    moments = dict(line.split() for line in text.splitlines() if line.startswith(("begun", "ended")))
    return float(moments["begun"]) - started, float(moments["ended"]) - started


def output(launcher: Sequence[str], program: str) -> str:
    """Run a program on all ranks to its end and return its output."""
    done = run_child([*launcher, "-c", program], timeout=LONGEST)
    if done.returncode:
        refuse(f"{' '.join(launcher[:3])} ... failed: {done.stderr.strip()[-400:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(parse, run))
