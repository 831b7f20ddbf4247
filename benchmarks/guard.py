"""Cost of guarded parameters in a training step.

    make -C benchmarks guard NP=2

Under ``zero1`` and ``fsdp``, parameters belong to a class that rejects sums of shards, except
during passes and optimizer steps. Models of small layers, with 200 and 2,000 parameters, are
trained by fused AdamW with and without that class. The two are interleaved, the first one drawn at
random. All ranks start each step together; the time of a step is that of the slowest rank. The
score is the median of the ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from harness.ranks import start
from harness.report import Target, table, target_table
from harness.run import finish, main, make_parser, parse_candidates
from harness.stats import summary
from harness.turns import announce, interleave, stop
from torch import nn

from hpctrain.parallel.guard.guard import unprotect

ROUNDS, WARMUP = 40, 5
STRATEGIES = ("ddp", "zero1", "fsdp")
WIDTH, SAMPLES, ASKED = 32, 64, 1.01
PARAMETERS, QUICK = (200, 2000), (20,)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return parse_candidates(make_parser("guard", __doc__, rounds=ROUNDS, least=2), argv, STRATEGIES, STRATEGIES)


def run(args: argparse.Namespace) -> None:
    job = start("guard")
    cases: list[dict[str, Any]] = []
    for count in QUICK if args.quick else PARAMETERS:
        for strategy in args.names:
            measured = {} if stop.number else measure(job, strategy, count, args.rounds)
            cases += [{"strategy": strategy, "parameters": count, **measured}] if measured else []
    if job.rank:
        return
    found = [
        Target(f"guarded / plain, {one['strategy']}, {one['parameters']}", one["ratio"], ASKED, False) for one in cases
    ]
    rows = [["strategy", "parameters", "ratio", "quartiles", "guarded ms", "plain ms"]]
    for case in cases:
        low, high = case["ratio_quartiles"]
        medians = [f"{case[name]['median'] * 1e3:.2f}" for name in ("guarded", "plain")]
        ratio = [f"{case['ratio']:.3f}", f"{low:.3f}-{high:.3f}"]
        rows.append([case["strategy"], str(case["parameters"]), *ratio, *medians])
    lines = [f"\nguarded / plain step, {job.size} ranks\n", target_table(found), f"{table(rows)}\n"]
    finish(args, "guard", {"asked": ASKED, "cases": cases}, lines, job=job, found=found)


def measure(job: Any, strategy: str, count: int, rounds: int) -> dict[str, Any]:
    """Return the times of steps with and without guarded parameters, and their ratio; empty if stopped. Collective."""
    announce(f"timing {strategy} with {count} parameters", job.comm)

    def turn(step: Callable[[], None], _: int) -> float:
        job.comm.barrier()
        started = time.perf_counter()
        step()
        return float(max(job.comm.all_gather_object(time.perf_counter() - started)))

    turns = {
        name: partial(turn, step_of(job, strategy, count, guards=name == "guarded")) for name in ("guarded", "plain")
    }
    times = interleave(turns, rounds, warmup=WARMUP, comm=job.comm, what="rounds")
    ratios = [one / other for one, other in zip(times["guarded"], times["plain"])]
    if len(ratios) < 2:
        return {}
    low, middle, high = statistics.quantiles(ratios, n=4)
    spread = {name: summary(each) for name, each in times.items()}
    return {"ratio": middle, "ratio_quartiles": [low, high], **spread}


def step_of(job: Any, strategy: str, count: int, *, guards: bool) -> Callable[[], None]:
    """Return a training step of a model with ``count`` parameters."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count // 2)]
    model = job.wrap(nn.Sequential(*layers), strategy)
    if not guards:
        unprotect(job.strategy(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.randn(SAMPLES, WIDTH)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    sys.exit(main(parse, run))
