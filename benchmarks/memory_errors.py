"""Cost of the comparison that finds memory errors, and what it finds: a GPT with 10.9 million parameters, DDP.

    make -C benchmarks memory-errors NP=3

In one run, interleaved: training steps of one and of four microbatches per rank, one comparison of the
bits of all parameters and moments over the ranks, and one copy of them in memory. All ranks start each
of these together; the time is that of the slowest rank.

Then a small model is trained through ``job.run``: undisturbed, with one random bit of a weight or moment
of a random rank changed in each of 200 steps, and once more for false alarms. With two ranks the run
repeats steps from its copy in memory, with more the majority repairs.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import plot
from harness.ranks import start
from harness.report import Target, at_least, at_most, step_table, target_table
from harness.run import finish, main, make_parser
from harness.stats import Times, ratio, summaries
from harness.training import token_loss
from harness.turns import announce, interleave, timed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpctrain
from hpctrain.log import logger
from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.wrap import attach
from hpctrain.train.replicas import bit_sums, compare_replicas, replicated

CONTEXT, VOCABULARY = 128, 256
ROUNDS, WARMUP = 30, 4
COUNTS = (1, 4)  # microbatches per rank
COMPARISON, COPY = "comparison", "copy in memory"
MOST = 0.03  # of a step
FLIPS, QUIET = 200, 2000  # changed bits; steps without one
PLACES = ("begin", "forward", "backward", "end")
SAMPLES, BATCH = 240, 24


def step_name(count: int) -> str:
    return f"step, {count} per rank"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("memory-errors", __doc__, rounds=ROUNDS)
    parser.add_argument("--batch", type=int, default=2, help="sequences per microbatch (default: %(default)s)")
    parser.add_argument("--flips", type=int, default=FLIPS, help="changed bits (default: %(default)s)")
    parser.add_argument("--quiet", type=int, default=QUIET, help="steps without changed bits (default: %(default)s)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    job = start("memory-errors")
    times = cost(job, args)
    announce(f"changing {args.flips} bits in {5 * args.flips} steps, then {args.quiet} steps without", job.comm)
    found = repairs(job, args.flips)
    alarms = false_alarms(job, args.quiet)
    if job.rank:
        return
    figures = list(targets(times, found, alarms, args))
    content = {
        "microbatch": args.batch,
        "context": CONTEXT,
        "seconds": times,
        "ratios": {each.what: each.value for each in figures},
        "changed_bits": found,
        "false_alarms": alarms,
    }
    lines = [f"\n{job.size} ranks\n", target_table(figures), step_table("", times)]
    finish(args, "memory-errors", content, lines, job=job, found=figures, draw=draw)


# Time of a comparison -------------------------------------------------------------------------------------------------


def cost(job: hpctrain.Job, args: argparse.Namespace) -> Times:
    """Return the times of steps, comparisons and copies. Collective."""
    torch.manual_seed(0)
    model = build(ModelSettings(name="gpt-tiny" if args.quick else "gpt-mini", context=CONTEXT), vocab_size=VOCABULARY)
    strategy = attach(model, job.comm, ParallelSettings())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(count: int, number: int) -> None:
        tokens = torch.randint(VOCABULARY, (count * args.batch, CONTEXT + 1))
        for index, some in enumerate(torch.split(tokens, args.batch)):
            loss = token_loss(model(some[:, :-1]), some[:, 1:]) / count
            if index == count - 1:
                loss.backward()  # type: ignore[no-untyped-call]
                continue
            with strategy.no_sync():
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step(1, 0)
    copies = {name: each.clone() for name, each in tensors_of(model, optimizer).items()}

    def copy(number: int) -> None:
        for name, each in tensors_of(model, optimizer).items():
            copies[name].copy_(each)

    def compare(number: int) -> None:
        if compare_replicas(job.comm, bit_sums(tensors_of(model, optimizer))) is not None:
            raise RuntimeError("the replicas differ")

    names = {step_name(count): partial(step, count) for count in COUNTS}
    turns = {name: partial(_timed, job, one) for name, one in {**names, COMPARISON: compare, COPY: copy}.items()}
    announce(f"timing {len(turns)} candidates", job.comm)
    seconds = interleave(turns, args.rounds, warmup=WARMUP, comm=job.comm, what="rounds")
    return summaries(job.comm.all_gather_object(seconds))


def _timed(job: hpctrain.Job, one: Any, number: int) -> float:
    return timed(lambda: one(number), job.comm)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return replicated({"": model}, {"": optimizer})


# Changed bits ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flip:
    """One changed bit: where in a step, on which rank, in which tensor, element and bit (of fractions)."""

    place: str
    rank: int
    tensor: float
    element: float
    bit: int

    @classmethod
    def draw(cls, source: random.Random, ranks: int) -> Flip:
        numbers = source.random(), source.random()
        return cls(source.choice(PLACES), source.randrange(ranks), *numbers, source.randrange(32))

    def apply(self, tensors: Mapping[str, Tensor], rank: int) -> str:
        """Change the bit if this is the rank; return the tensor's name."""
        name = list(tensors)[int(self.tensor * len(tensors))]
        if rank == self.rank:
            words = tensors[name].numpy().reshape(-1).view(np.uint32)  # autograd does not notice
            words[int(self.element * len(words))] ^= np.uint32(1 << self.bit)
        return name


def repairs(job: hpctrain.Job, flips: int) -> dict[str, Any]:
    """Return how many changed bits were found and named, and whether the weights are those without them. Collective."""
    source, steps = random.Random(7), 5 * flips
    planned = {step: Flip.draw(source, job.size) for step in sorted(source.sample(range(3, steps, 2), flips))}
    plain, _, _ = train(job, steps, {})
    weights, errors, made = train(job, steps, planned, fingerprint_every=1)
    return {
        "changed": len(made),
        "found": len(errors),
        "named": sum(one in errors for one in made),
        "equal": weights == plain,
        "repair": "replay" if job.size == 2 else "majority",
    }


def false_alarms(job: hpctrain.Job, steps: int) -> int:
    _, errors, _ = train(job, steps, {}, fingerprint_every=1)
    return len(errors)


def train(
    job: hpctrain.Job, steps: int, planned: Mapping[int, Flip], **options: Any
) -> tuple[str | None, list[tuple[int, str]], list[tuple[int, str]]]:
    """Train a small model; return its fingerprint, and the ranks and tensors that were named and that were changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 3))
    job.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(SAMPLES, 20), torch.randint(0, 3, (SAMPLES,)))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    waiting, made = dict(planned), list[tuple[int, str]]()

    def disturb(step: int, place: str) -> None:
        if step in waiting and waiting[step].place == place:
            flip = waiting.pop(step)
            made.append((flip.rank, flip.apply(_without_counts(tensors_of(model, optimizer)), job.rank)))

    with tempfile.TemporaryDirectory() as own, named_errors() as errors:
        folder = job.comm.broadcast_object(own)
        with job.run(model, optimizer, loader, checkpoints=folder, steps=steps, every=steps, **options) as run:
            for step, (inputs, classes) in run:
                disturb(step, "begin")
                outputs = model(inputs)
                disturb(step, "forward")
                loss = cross_entropy(outputs, classes)
                loss.backward()  # type: ignore[no-untyped-call]
                disturb(step, "backward")
                optimizer.step()
                optimizer.zero_grad()
                disturb(step, "end")
                run.log(loss=loss)
        job.comm.barrier()
    return run.fingerprint, errors, made


@contextmanager
def named_errors() -> Iterator[list[tuple[int, str]]]:
    """Yield a list that gets rank and tensor of each memory error that the run logs; nothing is printed meanwhile."""
    found: list[tuple[int, str]] = []
    pattern = re.compile(r"memory error in step \d+: (.*) of rank (\d+) on .* was wrong")

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if match := pattern.match(record.getMessage()):
                found.append((int(match[2]), match[1]))

    before, logger.handlers = logger.handlers, [Reader()]
    try:
        yield found
    finally:
        logger.handlers = before


def _without_counts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights and moments, without the optimizer's counts of steps."""
    return {name: each for name, each in tensors.items() if not name.startswith("step of")}


# Figures --------------------------------------------------------------------------------------------------------------


def targets(times: Times, found: Mapping[str, Any], alarms: int, args: argparse.Namespace) -> Iterator[Target]:
    for count in COUNTS:
        name = step_name(count)
        yield from at_most(f"{COMPARISON} / {name}", ratio(times, COMPARISON, name), MOST)
    yield from at_least(f"changed bits found, of {args.flips}", found["found"], args.flips)
    yield from at_least(f"ranks and tensors named, of {args.flips}", found["named"], args.flips)
    yield from at_least("final weights of the undisturbed run (1: yes)", float(found["equal"]), 1)
    yield from at_most(f"false alarms in {args.quiet} steps", alarms, 0)


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the times."""

    def fill(figure: Any) -> None:
        bars = plot.step_bars(result["seconds"], own=[COMPARISON, COPY])
        plot.bars(figure.subplots(), bars, "ms (bar: median; line: quartiles)", "On the slowest rank")
        figure.suptitle(f"Comparison of replicas, {result['ranks']} ranks", fontsize=13, fontweight="bold")

    return plot.save(path, (8, 3.5), fill)


if __name__ == "__main__":
    sys.exit(main(parse, run))
