"""Time of a training step of a compiled GPT with 10.9 million parameters, with every data-parallel strategy.

    make -C benchmarks compile NP=2

In one run, on the same ranks, batches and first weights: the model compiled by ``torch.compile`` and
trained by each rank alone, without an exchange; under hpctrain's DDP, ZeRO-1, ZeRO-2 and FSDP; under
torch's FSDP2 on gloo. The model alone, under FSDP and under FSDP2 is also timed without the compiler.
The whole model is compiled, after ``job.wrap``; FSDP2's is compiled block by block before
``fully_shard``, as torchtitan does.

The compiler is inductor if a C++ compiler is there, else ``aot_eager``, which runs the traced graphs
by torch's own kernels: it shows the cost of graphs and their breaks, and no gain. The candidates are
interleaved in random order; all ranks start each step together; the time of a step is that of the
slowest rank. The first step of each candidate, which compiles, is timed separately.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import plot
from harness.ranks import process_group, start, wait_asleep
from harness.report import Target, at_most, step_table, target_table
from harness.run import finish, main, make_parser, parse_candidates, words_of
from harness.stats import Times, differences, ratio, slowest, summaries
from harness.training import Training, time_all
from harness.turns import announce, timed
from torch import Tensor, nn
from torch_backend_steps import FULL, SMALL, VOCABULARY, WARMUP, sharded, tokens

from hpctrain.errors import UsageError
from hpctrain.models.build import build
from hpctrain.train.job import Job

ROUNDS = 30
TARGET = 1.0  # FSDP's step relative to that of the same compiled model alone
INDUCTOR, AOT_EAGER = "inductor", "aot_eager"
GRAPHS = 256  # torch's limit of graphs per function, which all candidates share


class Name(StrEnum):
    """Candidates."""

    ALONE = "no exchange, compiled"
    DDP = "hpctrain DDP, compiled"
    ZERO1 = "hpctrain ZeRO-1, compiled"
    ZERO2 = "hpctrain ZeRO-2, compiled"
    FSDP = "hpctrain FSDP, compiled"
    TORCH_FSDP = "torch FSDP2 + gloo, compiled"
    PLAIN_ALONE = "no exchange"
    PLAIN_FSDP = "hpctrain FSDP"
    PLAIN_TORCH_FSDP = "torch FSDP2 + gloo"


STRATEGIES: dict[str, str] = {
    Name.DDP: "ddp",
    Name.ZERO1: "zero1",
    Name.ZERO2: "zero2",
    Name.FSDP: "fsdp",
    Name.PLAIN_FSDP: "fsdp",
}
PLAIN: dict[str, str] = {
    Name.ALONE: Name.PLAIN_ALONE,
    Name.FSDP: Name.PLAIN_FSDP,
    Name.TORCH_FSDP: Name.PLAIN_TORCH_FSDP,
}
TORCH = (Name.TORCH_FSDP, Name.PLAIN_TORCH_FSDP)
NO_EXCHANGE = (Name.ALONE, Name.PLAIN_ALONE)


@dataclass
class Compiler:
    """Back end of ``torch.compile`` for one candidate, which counts its graphs.

    Graphs do not notice the hooks of a module, and torch uses a graph for all models of a class that
    have the same back end. Therefore each candidate has its own.
    """

    backend: str
    graphs: int = 0
    _compile: Any = field(default=None, repr=False)

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        """Return the compiled form of a graph."""
        self.graphs += 1
        self._compile = self._compile or importlib.import_module("torch._dynamo").lookup_backend(self.backend)
        return self._compile(graph, inputs)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("compile_step", __doc__, rounds=ROUNDS)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 64 tokens per rank (default: %(default)s)")
    parser.add_argument(
        "--compiler", choices=(INDUCTOR, AOT_EAGER), help="default: inductor if there is a C++ compiler, else aot_eager"
    )
    args = parse_candidates(parser, argv, words_of(Name), Name)
    args.compiler = args.compiler or usable_compiler()
    if args.batch < 1:
        raise UsageError(f"--batch {args.batch}: at least 1 sequence is needed")
    return args


def usable_compiler() -> str:
    """Return inductor if this machine has the C++ compiler that inductor calls, else aot_eager."""
    return INDUCTOR if shutil.which(os.environ.get("CXX", "g++")) else AOT_EAGER


def run(args: argparse.Namespace) -> None:
    job = start("compile")
    comm, settings = job.comm, SMALL if args.quick else FULL
    context = settings.context
    assert context is not None
    torch.manual_seed(0)
    model = build(settings, vocab_size=VOCABULARY)
    compilers = {name: Compiler(args.compiler) for name in args.names if name not in PLAIN.values()}
    with process_group(comm, needed=bool(set(args.names) & set(TORCH))):
        # job.wrap drops all graphs, so every model is wrapped before the first one is compiled.
        models = {name: candidate(job, name, copy.deepcopy(model), compilers.get(name)) for name in args.names}
        candidates = {
            name: Training(one, fused=name in STRATEGIES or name in NO_EXCHANGE) for name, one in models.items()
        }
        source = tokens(comm.rank, args.batch, context)
        first = compile_all(job, candidates, compilers, next(source))
        batches: dict[int, Tensor] = {}

        def turn(one: Training, number: int) -> float:
            if number not in batches:  # the first candidate of the round
                batches.clear()
                batches[number] = next(source)
            return timed(lambda: step(one, batches[number]), comm)

        turns = {name: partial(turn, one) for name, one in candidates.items()}
        seconds, losses = time_all(comm, candidates, turns, args.rounds, WARMUP)
    if job.rank:
        return
    times = summaries(seconds)
    drift = differences(losses, Name.PLAIN_TORCH_FSDP, without=NO_EXCHANGE)
    optimizers = {name: one.optimizer_name for name, one in candidates.items()}
    graphs = {name: one.graphs for name, one in compilers.items()}
    found = list(targets(times))
    content = {
        "compiler": args.compiler,
        "parameters": sum(each.numel() for each in model.parameters()),
        "batch_per_rank": args.batch,
        "context": context,
        "seconds": times,
        "compiled_gain": gains(times),
        "graphs": graphs,
        "first_step_seconds": first,
        "optimizers": optimizers,
        "largest_relative_loss_differences": drift,
    }
    what = f"{content['parameters']:,} parameters, {args.batch} x {context} tokens per rank, {job.size} ranks"
    lines = [f"\n{what}, compiled by {args.compiler}\n", target_table(found), *tables(times, graphs, first, optimizers)]
    if drift:
        lines.append(
            f"losses differ from those of {Name.PLAIN_TORCH_FSDP} by at most {max(drift.values()):.1e} (relative)\n"
        )
    finish(args, "compile", content, lines, job=job, found=found, draw=draw)


# Measurement ----------------------------------------------------------------------------------------------------------


def candidate(job: Job, name: str, model: nn.Module, compiler: Compiler | None) -> nn.Module:
    """Return the model with its strategy, to be compiled at its first call. Collective."""
    if name in TORCH:
        blocks = model.blocks
        assert isinstance(blocks, nn.ModuleList | nn.Sequential)
        for block in blocks if compiler else ():
            block.compile(backend=compiler)
        return sharded(model, dist.group.WORLD)
    if name in STRATEGIES:
        job.wrap(model, STRATEGIES[name])
    return model if compiler is None else torch.compile(model, backend=compiler)  # type: ignore[return-value]


def step(one: Training, batch: Tensor) -> None:
    """Run one step on tokens ``[batch, context + 1]``."""
    one.step(batch[:, :-1], batch[:, 1:])


def compile_all(
    job: Job, candidates: Mapping[str, Training], compilers: Mapping[str, Compiler], batch: Tensor
) -> dict[str, float]:
    """Run the first step of each candidate; return its seconds if it compiles. Collective."""
    if compilers:
        importlib.import_module("torch._dynamo").config.recompile_limit = GRAPHS
    own: dict[str, float] = {}
    for name, one in candidates.items():
        announce(f"first step: {name}", job.comm)
        if name == Name.ALONE:
            # Rank 0 compiles while the other ranks sleep; they find its code in the compiler's cache.
            own[name] = timed(lambda: step(one, batch)) if job.rank == 0 else 0.0
            wait_asleep(job.comm)
            if job.rank:
                step(one, batch)
        else:
            own[name] = timed(lambda: step(one, batch), job.comm)
    gc.collect()
    gc.freeze()  # the compiler leaves so many objects that a collection before each step takes longer than the step
    gathered = job.comm.all_gather_object(own)
    return {name: slowest([[each[name]] for each in gathered])[0] for name in compilers}


# Figures --------------------------------------------------------------------------------------------------------------


def targets(times: Times) -> Iterator[Target]:
    """Yield the target, if both of its candidates were measured."""
    yield from at_most(f"step: {Name.FSDP} / {Name.ALONE}", ratio(times, Name.FSDP, Name.ALONE), TARGET)


def gains(times: Times) -> dict[str, float]:
    """Return the time of a step without the compiler relative to that with it, by compiled candidate."""
    found = {name: ratio(times, plain, name) for name, plain in PLAIN.items()}
    return {name: value for name, value in found.items() if value is not None}


def tables(
    times: Times, graphs: Mapping[str, int], first: Mapping[str, float], optimizers: Mapping[str, str]
) -> list[str]:
    """Return the table of the steps, with the compiler's figures."""
    alone = {name: f"{value:.2f}" for name in times if (value := ratio(times, name, Name.ALONE)) is not None}
    more = {
        f"/ {Name.ALONE}": alone,
        "not compiled / compiled": {name: f"{value:.2f}" for name, value in gains(times).items()},
        "graphs": {name: str(number) for name, number in graphs.items()},
        "first step s": {name: f"{value:.1f}" for name, value in first.items()},
        "optimizer": optimizers,
    }
    return [step_table("step", times, more)]


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the time of a step per candidate."""

    def fill(figure: Any) -> None:
        rows = plot.step_bars(result["seconds"], own=NO_EXCHANGE)
        numbers = f"{result['parameters'] / 1e6:.1f} million parameters, {result['ranks']} ranks, {result['compiler']}"
        plot.bars(figure.subplots(), rows, "ms (bar: median; line: quartiles)", f"A step of a GPT of {numbers}")

    return plot.save(path, (9, 4.4), fill)


if __name__ == "__main__":
    sys.exit(main(parse, run))
