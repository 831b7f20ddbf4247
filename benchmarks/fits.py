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
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from fsdp_step_memory import MB, Task
from fsdp_step_samples import resident
from harness.memory import STATUS, memory_fields
from harness.ranks import mpiexec, run_child, start
from harness.report import table
from harness.run import finish, main, make_parser
from harness.training import token_loss
from harness.turns import announce, until_stopped

from hpctrain.errors import UsageError
from hpctrain.models.settings import ModelSettings
from hpctrain.parallel.config import ParallelSettings
from hpctrain.util.text import parse_bytes

STEPS = 5
BUDGET = 5.0  # multiple of the parameters; on four ranks FSDP needed 2.7 to 3.7 times, DDP 8.3 to 8.7 times
WORDS = 400  # maximum characters of an error that are shown
# 51 million parameters, and 19 million for tests.
LARGE = ModelSettings(name="gpt-mini", context=64, layers=16, width=512, heads=8)
MEDIUM = ModelSettings(name="gpt-mini", context=64, layers=6, width=512, heads=8)
LONGEST = 900.0  # seconds that a run may take
RESULT = "trained "  # prefix of a run's result


@dataclass(frozen=True)
class Outcome:
    """End of a run: its training result, or its error."""

    trained: dict[str, Any] | None
    code: int
    error: str


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("fits", __doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--budget", help=f"bytes that a rank may add; default: {BUDGET:g} times the parameters")
    parser.add_argument("--train", choices=("ddp", "fsdp"), help="run one rank (used by the benchmark itself)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps that FSDP trains")
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.steps < 2:
        raise UsageError(f"{args.ranks} ranks and {args.steps} steps: at least 2 of each are needed")
    args.budget = parse_bytes(args.budget) if args.budget else None
    args.task = Task(MEDIUM if args.quick else LARGE)
    return args


def run(args: argparse.Namespace) -> int:
    """Make the three runs, or run one rank of one of them; return 1 if a run did not end as expected."""
    return train(args) if args.train else compare(args, play)


def train(args: argparse.Namespace) -> int:
    """Train on one batch per rank, within the budget if there is one; rank 0 prints the result.

    That is the mean loss of each step, and the peak memory in bytes, beyond that of the ranks after
    they had joined the job: address space of a rank, resident memory of all ranks together.
    """
    job = start("fits")
    start_size, before = memory_fields(STATUS)["VmSize"], resident().total
    if args.budget is not None:
        resource.setrlimit(resource.RLIMIT_AS, (start_size + args.budget, start_size + args.budget))
    with torch.device("meta"):
        model = args.task.model()
    model = job.wrap(model, ParallelSettings(data=args.train))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = next(args.task.batches(job.rank))
    losses, most = [], 0
    for _ in range(args.steps):
        loss = token_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        most = max(most, resident().total - before)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    ranks = job.comm.all_gather_object((losses, memory_fields(STATUS)["VmPeak"] - start_size, most))
    if job.rank == 0:
        all_losses, peaks, pages = zip(*ranks)
        means = [sum(step) / len(step) for step in zip(*all_losses)]
        found = {"losses": means, "address_space": max(peaks), "resident": sum(pages)}
        print(f"{RESULT}{json.dumps(found)}", flush=True)
    return 0


def compare(args: argparse.Namespace, play: Callable[[argparse.Namespace, str, int | None], Outcome]) -> int:
    """Make the three runs; print and write their results."""
    budget = args.budget or int(BUDGET * args.task.parameter_bytes)
    runs: dict[str, Outcome] = {}
    with until_stopped:
        for name, data, limit in (("DDP, no limit", "ddp", None), ("DDP", "ddp", budget), ("FSDP", "fsdp", budget)):
            runs[name] = play(args, data, limit)
    shown = len(runs) == 3 and runs["DDP"].trained is None and runs["DDP"].code != 0 and fell(runs["FSDP"])
    report(args, budget, runs, shown)
    return 0 if shown else 1


def play(args: argparse.Namespace, data: str, budget: int | None) -> Outcome:
    """Start the ranks of one run and return how it ended."""
    announce(f"{data}, {'no limit' if budget is None else 'inside the limit'}")
    options = ["--train", data, "--steps", str(args.steps if budget else 2)]
    options += ["--quick"] * args.quick + (["--budget", str(budget)] if budget else [])
    done = run_child([*mpiexec(args.ranks), sys.executable, __file__, *options], timeout=LONGEST)
    told = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    trained = json.loads(told[0].removeprefix(RESULT)) if told else None
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
    millions = args.task.parameter_bytes / 4e6
    lines = [f"{millions:.1f} million parameters, {args.ranks} ranks, {args.task.context} tokens each"]
    lines += [f"limit: {budget / MB:.0f} MB of address space per rank, beyond its size after joining the job\n"]
    rows = [["", "steps", "first loss", "last loss", "MB per rank (address space)", "MB of all ranks (pages)"]]
    lines.append(table([*rows, *([name, *_cells(one.trained, budget)] for name, one in runs.items())]))
    for name, one in runs.items():
        if one.trained is None:
            lines.append(f"\n{name} ended with exit code {one.code}: {one.error}")
    verdict = "yes" if shown else "no"
    lines.append(f"\nDDP does not fit, FSDP trains and its loss falls in every step: {verdict}")
    content = {
        "ranks": args.ranks,
        "parameters": args.task.parameter_bytes // 4,
        "budget_bytes": budget,
        "shown": shown,
        "runs": {name: asdict(one) for name, one in runs.items()},
    }
    peaks = {name: one.trained["address_space"] for name, one in runs.items() if one.trained}
    spread = [("address space, bytes", name, "", peak, peak, peak, 1) for name, peak in peaks.items()]
    finish(args, "fits", content, lines, file=f"fits-np{args.ranks}", ranks=args.ranks, rows=spread)


def _cells(trained: dict[str, Any] | None, budget: int) -> list[str]:
    if trained is None:
        return ["", "", "", f"more than {budget / MB:.0f}", ""]
    losses = trained["losses"]
    memory = [f"{trained[name] / MB:.0f}" for name in ("address_space", "resident")]
    return [str(len(losses)), f"{losses[0]:.3f}", f"{losses[-1]:.3f}", *memory]


if __name__ == "__main__":
    sys.exit(main(parse, run))
