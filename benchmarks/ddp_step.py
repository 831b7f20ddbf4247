"""Time of a training step of a GPT with 10.9 million parameters, and the cost of gradient synchronisation in it.

In one run, on the same ranks, the same batches and the same initial weights: the step without
synchronisation, torch's DistributedDataParallel on gloo (with default options, and with gradients
as bucket views), and hpctrain's DDP. The candidates are interleaved, so that drift of the machine
affects all of them. All ranks start each step together; the time of a step is that of the slowest
rank. The score is

    (step without synchronisation + 2 S / B) / step

with S the bytes of all gradients, and B the rate at which one core streams memory (read + written)
while all ranks do: a reduction in place must move at least 2 S bytes per rank.

    mpiexec -n 2 python benchmarks/ddp_step.py --rounds 40
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from harness.ranks import process_group, start
from harness.report import Target, at_least, step_table, target_table
from harness.run import finish, main, make_parser, parse_candidates
from harness.stats import Times, differences, ratio, slowest, summaries
from harness.training import Training, time_all
from harness.turns import timed
from torch import nn

from hpctrain.comm.communicator import Communicator
from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings
from hpctrain.train.job import Job

CONTEXT = 128
ALONE, OURS = "no synchronisation", "hpctrain DDP"
TORCH, TORCH_VIEWS = "torch DDP + gloo", "torch DDP + gloo, bucket views"
WORDS = {"alone": ALONE, "torch": TORCH, "torch-views": TORCH_VIEWS}
TARGET_SCORE, TARGET_SPEEDUP = 0.95, 1.2
STREAM_BYTES = 64 * 2**20


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("ddp_step", __doc__, rounds=40, quick=False)
    parser.add_argument("--warmup", type=int, default=5, help="steps before, not timed")
    parser.add_argument("--batch", type=int, default=1, help="sequences of 128 tokens per rank")
    return parse_candidates(parser, argv, WORDS, (ALONE, TORCH, TORCH_VIEWS, OURS))


def run(args: argparse.Namespace) -> None:
    job = start("ddp-step", least=1)
    torch.manual_seed(0)
    model = build(ModelSettings(name="gpt-mini", context=CONTEXT), vocab_size=256)
    gradient_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    ddp = nn.parallel.DistributedDataParallel
    attach: dict[str, Callable[[nn.Module], nn.Module]] = {
        ALONE: lambda module: module,
        TORCH: ddp,
        TORCH_VIEWS: lambda module: ddp(module, gradient_as_bucket_view=True),
        OURS: job.wrap,
    }
    with process_group(job.comm):
        candidates = {name: Training(attach[name](copy.deepcopy(model))) for name in args.names}
        turns = {name: partial(turn, job.comm, one, args.batch) for name, one in candidates.items()}
        seconds, losses = time_all(job.comm, candidates, turns, args.rounds, args.warmup)
        stream = stream_rate(job.comm)
    if job.rank == 0:
        drift = differences(losses[:1], TORCH, without=(ALONE, TORCH_VIEWS))
        report(args, job, summaries(seconds), drift.get(OURS, 0.0), gradient_bytes, stream)


def turn(comm: Communicator, one: Training, batch: int, number: int) -> float:
    """Return the seconds of a step that all ranks start together, on tokens of the rank and the step. Collective."""
    generator = torch.Generator().manual_seed(1000 * number + comm.rank)
    tokens = torch.randint(256, (batch, CONTEXT + 1), generator=generator)
    return timed(lambda: one.step(tokens[:, :-1], tokens[:, 1:]), comm)


def stream_rate(comm: Communicator) -> float:
    """Return the bytes/s (read + written) that one core copies while all ranks do, on the slowest rank. Collective."""
    source, target = torch.ones(STREAM_BYTES // 4), torch.ones(STREAM_BYTES // 4)
    seconds = [timed(lambda: target.copy_(source), comm) for _ in range(15)]
    return 2 * STREAM_BYTES / statistics.median(slowest(comm.all_gather_object(seconds)))


def report(args: argparse.Namespace, job: Job, times: Times, drift: float, gradient_bytes: int, stream: float) -> None:
    """Print ratios first, then times; write all of it."""
    score = None
    if ALONE in times and OURS in times:
        score = (times[ALONE]["median"] + 2 * gradient_bytes / stream) / times[OURS]["median"]
    speedups = {name: value for name in (TORCH, TORCH_VIEWS) if (value := ratio(times, name, OURS)) is not None}
    found = list(at_least("score (no-sync step + 2S/B) / step", score, TARGET_SCORE))
    found += [Target(f"step: {name} / {OURS}", value, TARGET_SPEEDUP) for name, value in speedups.items()]
    content = {
        "score": score,
        "speedups": speedups,
        "largest_relative_loss_difference": drift,
        "gradient_bytes": gradient_bytes,
        "stream_bytes_per_second": stream,
        "batch_per_rank": args.batch,
        "seconds": times,
    }
    lines = [target_table(found), step_table("step", times)]
    lines.append(f"losses differ from torch's by {drift:.1e} (relative, largest of all steps)")
    lines.append(f"S = {gradient_bytes / 1e6:.1f} MB, B = {stream / 1e9:.1f} GB/s per core, {args.rounds} rounds")
    finish(args, "ddp-step", content, lines, job=job, file=f"ddp-step-np{job.size}", found=found)


if __name__ == "__main__":
    sys.exit(main(parse, run))
