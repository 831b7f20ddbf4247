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
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import turns
from harness import guarded, mpi_name, mpi_slug, provenance, summary, table, write
from torch import nn

import hpctrain
from hpctrain.errors import UsageError
from hpctrain.parallel.guard.guard import unprotect

ROUNDS, WARMUP = 40, 5
STRATEGIES = ("ddp", "zero1", "fsdp")
WIDTH, SAMPLES, ASKED = 32, 64, 1.01
PARAMETERS, QUICK = (200, 2000), (20,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints and writes. Return the exit code."""
    return guarded(lambda: run(parse(argv)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    words = {name: name for name in STRATEGIES}
    return turns.parse("guard.py", __doc__, argv, rounds=ROUNDS, words=words, candidates=STRATEGIES)


def run(args: argparse.Namespace) -> None:
    """Measure all cases on the ranks of the job."""
    job = hpctrain.init(device="cpu")
    if job.size < 2:
        raise UsageError("one rank holds all of its parameters: make -C benchmarks guard starts two", everywhere=True)
    cases = []
    for count in QUICK if args.quick else PARAMETERS:
        for strategy in args.names:
            if job.rank == 0:
                print(f"timing {strategy} with {count} parameters ...", file=sys.stderr, flush=True)
            cases.append({"strategy": strategy, "parameters": count, **measure(job, strategy, count, args.rounds)})
    if job.rank == 0:
        content = {
            "benchmark": "guard",
            "ranks": job.size,
            "mpi": mpi_name(),
            "quick": args.quick,
            "asked": ASKED,
            "cases": cases,
            "provenance": provenance(job.size, mpi_name()),
        }
        report(content, args)


def measure(job: Any, strategy: str, count: int, rounds: int) -> dict[str, Any]:
    """Return the times of steps with and without guarded parameters, and their ratio."""
    steps = [step_of(job, strategy, count, guards=guards) for guards in (True, False)]
    times: list[list[float]] = [[], []]
    lots = random.Random(0)
    for number in range(WARMUP + rounds):
        for which in lots.sample((0, 1), 2):
            job.comm.barrier()
            start = time.perf_counter()
            steps[which]()
            seconds = max(job.comm.all_gather_object(time.perf_counter() - start))
            if number >= WARMUP:
                times[which].append(seconds)
    ratios = [one / other for one, other in zip(*times)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "guarded": summary(times[0]),
        "plain": summary(times[1]),
    }


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


def report(content: dict[str, Any], args: argparse.Namespace) -> None:
    """Print and write a result."""
    path = write(f"guard-np{content['ranks']}-{mpi_slug()}", content, args.results)
    if args.json:
        print(json.dumps(content, indent=2))
        return
    print(f"\nguarded / plain step, {content['ranks']} ranks, target: at most {ASKED}\n")
    rows = [["strategy", "parameters", "ratio", "quartiles", "guarded ms", "plain ms"]]
    for case in content["cases"]:
        low, high = case["ratio_quartiles"]
        medians = [f"{case[name]['median'] * 1e3:.2f}" for name in ("guarded", "plain")]
        ratio = [f"{case['ratio']:.3f}", f"{low:.3f}-{high:.3f}"]
        rows.append([case["strategy"], str(case["parameters"]), *ratio, *medians])
    print(table(rows) + f"\n\nwritten to {path}")


if __name__ == "__main__":
    sys.exit(main())
