"""Demonstration that a model that does not fit a memory limit with DDP can be trained within it with FSDP.

Several ranks train a GPT that was built on the meta device, in three runs: with DDP and no limit,
to measure its need; with DDP and a limit on each rank's address space (RLIMIT_AS), which must end
with an error; and with FSDP within the same limit, where the loss must fall. The limit is the
address space of a rank after it has joined the job, plus a budget.

    python benchmarks/fits.py --ranks 4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comm.sizes import parse_sizes
from harness import RESULTS, provenance, table, write
from sharding.limit import LARGE, MEDIUM, train
from sharding.task import Task

import hpctrain
from hpctrain.cli.main import Parser
from hpctrain.cli.main import report as report_error
from hpctrain.errors import UsageError

STEPS = 5
BUDGET = 5.0  # multiple of the parameters; on four ranks FSDP needed 2.7 to 3.7 times, DDP 8.3 to 8.7 times
WORDS = 400  # maximum characters of an error that are shown
MB = 10**6
LONGEST = 900.0  # seconds that a run may take
MARK = "trained "  # prefix of a run's result


@dataclass(frozen=True)
class Outcome:
    """End of a run: its training result, or its error."""

    trained: dict[str, Any] | None
    code: int
    error: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one rank of one of its runs; return the exit code, 1 if a run did not end as expected."""
    try:
        args = parse(argv)
        return rank(args) if args.train else compare(args)
    except UsageError as error:
        return report_error(error)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="fits.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--budget", help=f"bytes that a rank may add; default: {BUDGET:g} times the parameters")
    parser.add_argument("--quick", action="store_true", help="a smaller model: for tests")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--train", choices=("ddp", "fsdp"), help="run one rank (used by the benchmark itself)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps that FSDP trains")
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.steps < 2:
        raise UsageError(f"{args.ranks} ranks and {args.steps} steps: at least 2 of each are needed", everywhere=True)
    args.budget = parse_sizes(args.budget)[0] if args.budget else None
    args.task = Task(MEDIUM if args.quick else LARGE)
    return args


def rank(args: argparse.Namespace) -> int:
    """Train as one rank of a run; rank 0 prints the result."""
    job = hpctrain.init(device="cpu")
    found = train(job, args.task, args.train, args.steps, args.budget)
    if job.rank == 0:
        print(f"{MARK}{json.dumps(found)}", flush=True)
    return 0


def compare(args: argparse.Namespace) -> int:
    """Make the three runs; print and write their results."""
    budget = args.budget or int(BUDGET * args.task.parameter_bytes)
    free, ddp, fsdp = play(args, "ddp", None), play(args, "ddp", budget), play(args, "fsdp", budget)
    shown = ddp.trained is None and ddp.code != 0 and fell(fsdp)
    report(args, budget, {"DDP, no limit": free, "DDP": ddp, "FSDP": fsdp}, shown)
    return 0 if shown else 1


def play(args: argparse.Namespace, data: str, budget: int | None) -> Outcome:
    """Start the ranks of one run and return how it ended."""
    print(f"{data}, {'no limit' if budget is None else 'inside the limit'} ...", file=sys.stderr, flush=True)
    launcher = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(args.ranks), sys.executable, __file__]
    options = ["--train", data, "--steps", str(args.steps if budget else 2)]
    options += ["--quick"] * args.quick + (["--budget", str(budget)] if budget else [])
    done = subprocess.run([*launcher, *options], capture_output=True, text=True, timeout=LONGEST)
    told = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    trained = json.loads(told[0].removeprefix(MARK)) if told else None
    return Outcome(trained, done.returncode, reason_of(done.stderr) if done.returncode else "")


def fell(outcome: Outcome) -> bool:
    """Return whether a run ended successfully and its loss fell in every step."""
    losses = outcome.trained["losses"] if outcome.trained else []
    return outcome.code == 0 and len(losses) > 1 and all(new < old for old, new in zip(losses, losses[1:]))


def reason_of(error: str) -> str:
    """Return the reason in an error output: from hpctrain's own line on, without the launcher's lines."""
    lines = [line.strip() for line in error.splitlines() if line.strip() and not line.startswith("Abort(")]
    ours = [number for number, line in enumerate(lines) if line.startswith("hpctrain: ")]
    return " ".join(lines[ours[0] if ours else -1 :])[:WORDS] or "no output"


def report(args: argparse.Namespace, budget: int, runs: dict[str, Outcome], shown: bool) -> None:
    """Print and write the results of the runs."""
    millions = args.task.parameter_bytes / 4e6
    print(f"{millions:.1f} million parameters, {args.ranks} ranks, {args.task.context} tokens each")
    print(f"limit: {budget / MB:.0f} MB of address space per rank, beyond its size after joining the job\n")
    rows = [["", "steps", "first loss", "last loss", "MB per rank (address space)", "MB of all ranks (pages)"]]
    for name, one in runs.items():
        rows.append([name, *_cells(one.trained, budget)])
    print(table(rows))
    for name, one in runs.items():
        if one.trained is None:
            print(f"\n{name} ended with exit code {one.code}: {one.error}")
    verdict = "yes" if shown else "no"
    print(f"\nDDP does not fit, FSDP trains and its loss falls in every step: {verdict}")
    content = {
        "benchmark": "fits",
        "ranks": args.ranks,
        "parameters": args.task.parameter_bytes // 4,
        "quick": args.quick,
        "budget_bytes": budget,
        "shown": shown,
        "runs": {name: asdict(one) for name, one in runs.items()},
        "provenance": {**provenance(args.ranks, "see command"), "command": " ".join(["python", *sys.argv])},
    }
    print(f"written to {write(f'fits-np{args.ranks}', content, args.results)}")


def _cells(trained: dict[str, Any] | None, budget: int) -> list[str]:
    if trained is None:
        return ["", "", "", f"more than {budget / MB:.0f}", ""]
    losses = trained["losses"]
    memory = [f"{trained[name] / MB:.0f}" for name in ("address_space", "resident")]
    return [str(len(losses)), f"{losses[0]:.3f}", f"{losses[-1]:.3f}", *memory]


if __name__ == "__main__":
    sys.exit(main())
