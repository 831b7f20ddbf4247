"""Cost of parallel.reproducible in a training step of a GPT with 10.9 million parameters.

    make -C benchmarks reproducible NP=2

In one run, on the same ranks, batches and first weights: DDP, ZeRO-1 and FSDP, each without and with
``parallel.reproducible``, with one microbatch per rank and with four. Without it, several microbatches
are several backward passes whose gradients the strategy accumulates as it does by default. A step ends
with the gradient norm, clipping and the update by AdamW.

The candidates are interleaved in random order; all ranks start each step together; the time of a step
is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from harness import plot
from harness.ranks import start
from harness.report import Target, at_most, step_table, target_table
from harness.run import finish, main, make_parser, parse_candidates
from harness.stats import Times, ratio, summaries
from harness.training import Training, time_all
from harness.turns import timed
from torch import Tensor, nn

from hpctrain.comm.communicator import Communicator
from hpctrain.data.random_streams import RandomStreams
from hpctrain.errors import UsageError
from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.wrap import attach
from hpctrain.train.microbatches import ReproducibleBackward

CONTEXT, VOCABULARY = 128, 256
ROUNDS, WARMUP = 30, 4
STRATEGIES: dict[str, Literal["ddp", "zero1", "fsdp"]] = {"DDP": "ddp", "ZeRO-1": "zero1", "FSDP": "fsdp"}
TARGETS = {1: 1.15, 4: 1.05}  # step with / without, by microbatches per rank
NORM = 1.0


def name_of(strategy: str, count: int, *, reproducible: bool) -> str:
    """Return the name of a candidate with a number of microbatches per rank."""
    return f"{strategy}{', reproducible' if reproducible else ''}, {count} per rank"


KINDS = {
    name_of(strategy, count, reproducible=reproducible): (strategy, count, reproducible)
    for count in TARGETS
    for strategy in STRATEGIES
    for reproducible in (False, True)
}
WORDS = {
    f"{STRATEGIES[strategy]}{'-reproducible' if reproducible else ''}-{count}": name
    for name, (strategy, count, reproducible) in KINDS.items()
}


class Candidate(Training):
    """Training of the model by microbatches of ``size`` samples per rank."""

    def __init__(self, name: str, model: nn.Module, comm: Communicator, size: int) -> None:
        strategy, self.count, reproducible = KINDS[name]
        self.comm, self.size = comm, size
        self.strategy = attach(model, comm, ParallelSettings(data=STRATEGIES[strategy], reproducible=reproducible))
        super().__init__(model)
        total = self.count * size * comm.size
        self._backward = ReproducibleBackward([self.strategy], RandomStreams(), size, total) if reproducible else None

    def step(self, inputs: Tensor, targets: Tensor, sample: Any = None) -> None:
        """Run one step on this rank's samples, from forward to optimizer step."""
        if self._backward is not None:
            passes = lambda begin, end: self._loss(self.model(inputs[begin:end]), targets[begin:end])
            loss = float(self._backward(len(inputs) * self.comm.size, passes))
        else:
            loss = self._plain(inputs, targets)
        self.strategy.clip_grad_norm(NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss)

    def _plain(self, inputs: Tensor, targets: Tensor) -> float:
        total = 0.0
        pairs = list(zip(torch.split(inputs, self.size), torch.split(targets, self.size)))
        for number, (some, their) in enumerate(pairs):
            syncs = number == len(pairs) - 1 or self.strategy.reduces_early
            with nullcontext() if syncs else self.strategy.no_sync():
                loss = self._loss(self.model(some), their) / len(pairs)
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("reproducible", __doc__, rounds=ROUNDS)
    parser.add_argument("--batch", type=int, default=2, help="sequences per microbatch (default: %(default)s)")
    args = parse_candidates(parser, argv, WORDS, tuple(KINDS))
    if args.batch < 1:
        raise UsageError(f"--batch {args.batch}: at least 1 sequence is needed")
    return args


def run(args: argparse.Namespace) -> None:
    job = start("reproducible")
    comm = job.comm
    torch.manual_seed(0)
    settings = ModelSettings(name="gpt-tiny" if args.quick else "gpt-mini", context=CONTEXT)
    model = build(settings, vocab_size=VOCABULARY)
    candidates = {name: Candidate(name, copy.deepcopy(model), comm, args.batch) for name in args.names}
    turns = {name: partial(turn, comm, one) for name, one in candidates.items()}
    seconds, losses = time_all(comm, candidates, turns, args.rounds, WARMUP)
    if job.rank:
        return
    times = summaries(seconds)
    found = list(targets(times))
    content = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "microbatch": args.batch,
        "context": CONTEXT,
        "seconds": times,
        "ratios": {each.what: each.value for each in found},
        "same_bits": same_bits(losses[0]),
    }
    what = f"{content['parameters']:,} parameters, {args.batch} x {CONTEXT} tokens per microbatch, {job.size} ranks"
    lines = [f"\n{what}\n", target_table(found), step_table("step", times)]
    for count, equal in content["same_bits"].items():
        lines.append(f"{count} per rank: losses of all reproducible strategies {'equal' if equal else 'DIFFER'}\n")
    finish(args, "reproducible", content, lines, job=job, found=found, draw=draw)


def turn(comm: Communicator, one: Candidate, number: int) -> float:
    """Return the seconds of a step that all ranks start together, on tokens of the rank and the step. Collective."""
    generator = torch.Generator().manual_seed(1000 * number + comm.rank)
    tokens = torch.randint(VOCABULARY, (one.count * one.size, CONTEXT + 1), generator=generator)
    return timed(lambda: one.step(tokens[:, :-1], tokens[:, 1:]), comm)


def targets(times: Times) -> Iterator[Target]:
    for count, target in TARGETS.items():
        for strategy in STRATEGIES:
            with_it, without = (name_of(strategy, count, reproducible=each) for each in (True, False))
            yield from at_most(f"step: {with_it} / without", ratio(times, with_it, without), target)


def same_bits(losses: Any) -> dict[str, bool]:
    """Return, by microbatches per rank, whether all reproducible strategies had the same losses, bit for bit."""
    found: dict[str, bool] = {}
    for count in TARGETS:
        every = [losses[name] for name in losses if KINDS[name][1:] == (count, True)]
        if every:
            found[str(count)] = all(each == every[0] for each in every)
    return found


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the time of a step per candidate."""

    def fill(figure: Any) -> None:
        own = [name for name in result["seconds"] if KINDS[name][2]]
        plot.bars(
            figure.subplots(), plot.step_bars(result["seconds"], own=own), "ms (bar: median; line: quartiles)",
            "A step, on the slowest rank",
        )  # fmt: skip
        figure.suptitle(
            f"Cost of parallel.reproducible: GPT of {result['parameters'] / 1e6:.1f} million parameters, "
            f"{result['ranks']} ranks",
            fontsize=13,
            fontweight="bold",
        )

    return plot.save(path, (8, 5), fill)


if __name__ == "__main__":
    sys.exit(main(parse, run))
