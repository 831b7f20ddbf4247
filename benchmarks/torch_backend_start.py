"""Time from ``init_process_group`` to the end of the first collective: hpctrain under mpiexec, gloo under torchrun.

The same program runs on the same number of ranks: it imports torch, creates the process group, and
reduces one element. Time counts from the moment at which the last rank calls ``init_process_group``
to the moment at which the last rank has the result. With hpctrain, it includes the start of MPI; with
gloo, torchrun has already let the ranks meet. The time from the start of the launcher covers both.
The candidates are interleaved.

    python benchmarks/torch_backend_start.py --ranks 8 --rounds 7
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from functools import partial

from harness.ranks import mpiexec, refuse, run_child
from harness.report import at_least, table, target_table
from harness.run import finish, main, make_parser
from harness.stats import ratio, summary
from harness.turns import interleave

from hpctrain.errors import UsageError

TARGET = 1.0  # times faster than torchrun with gloo
LONGEST = 120.0  # seconds that a job may take
OURS, GLOO = "mpiexec, hpctrain", "torchrun, gloo"
FIRST, WHOLE = "init_process_group to first collective", "launcher to first collective"
PROGRAM = """
import time
import torch
import torch.distributed as dist
begun = time.time()
{setup}
tensor = torch.ones(1)
dist.all_reduce(tensor)
ended = time.time()
assert tensor.item() == dist.get_world_size() == {ranks}
print(f"times {{begun!r}} {{ended!r}}\\n", end="", flush=True)
dist.destroy_process_group()
"""
SETUP = {
    OURS: 'from hpctrain.torch_backend.register import register\nregister()\ndist.init_process_group("hpctrain")',
    GLOO: 'dist.init_process_group("gloo")',
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("torch_backend_start", __doc__, rounds=7, quick=False)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args(argv)
    if args.ranks < 1:
        raise UsageError(f"--ranks {args.ranks}: at least 1 is needed")
    return args


def run(args: argparse.Namespace) -> None:
    turns = {name: partial(measure, name, args.ranks) for name in (OURS, GLOO)}
    measured = interleave(turns, args.rounds, what="rounds")  # the first round warms the file cache
    times = {
        what: {name: summary([each[what] for each in found]) for name, found in measured.items() if found}
        for what in (FIRST, WHOLE)
    }
    ratios = {what: value for what in times if (value := ratio(times[what], GLOO, OURS)) is not None}
    found = list(at_least(f"{FIRST}, {args.ranks} ranks: gloo / hpctrain", ratios.get(FIRST), TARGET))
    lines = [target_table(found)]
    for what, each in times.items():
        rows = [[what, "median s", "min", "max"]]
        rows += [[name, *(f"{one[key]:.3f}" for key in ("median", "min", "max"))] for name, one in each.items()]
        lines.append(f"{table(rows)}\n")
    content, file = {"ratios": ratios, "seconds": times}, f"torch-backend-start-np{args.ranks}"
    finish(args, "torch-backend-start", content, lines, file=file, ranks=args.ranks, found=found)


def command(name: str, ranks: int) -> list[str]:
    """Return the words that start the program on a number of ranks."""
    program = ["-c", PROGRAM.format(setup=SETUP[name], ranks=ranks)]
    if name == OURS:
        return [*mpiexec(ranks), sys.executable, *program]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, "--no-python", sys.executable, *program]


def measure(name: str, ranks: int, _: int) -> dict[str, float]:
    """Return the seconds to the first collective on all ranks, from both beginnings."""
    words = command(name, ranks)
    started = time.time()
    done = run_child(words, timeout=LONGEST)
    moments = [tuple(map(float, pair)) for pair in re.findall(r"times (\S+) (\S+)", done.stdout)]
    if done.returncode or len(moments) != ranks:
        refuse(f"{name} on {ranks} ranks failed: {done.stderr.strip()[-400:]}")
    begun, ended = (max(column) for column in zip(*moments))
    return {FIRST: ended - begun, WHOLE: ended - started}


if __name__ == "__main__":
    sys.exit(main(parse, run))
