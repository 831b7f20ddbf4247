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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from harness.report import step_table
from harness.run import announce, check_names, finish, interleave, main, make_parser, process_group, split, start, timed
from harness.stats import Times, differences, ratio, slowest, summaries
from harness.targets import Target, at_least, target_table, targets_json
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpctrain.comm.communicator import Communicator
from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings

CONTEXT = 128
ALONE, OURS = "no synchronisation", "hpctrain DDP"
TORCH, TORCH_VIEWS = "torch DDP + gloo", "torch DDP + gloo, bucket views"
WORDS = {"alone": ALONE, "torch": TORCH, "torch-views": TORCH_VIEWS}
TARGET_SCORE, TARGET_SPEEDUP = 0.95, 1.2
STREAM_BYTES = 64 * 2**20


class Candidate:
    """Training setup of the same model, and its losses."""

    def __init__(self, model: nn.Module, attach: Callable[[nn.Module], nn.Module]) -> None:
        self.model = attach(copy.deepcopy(model))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.losses: list[float] = []

    def step(self, tokens: Tensor) -> None:
        """Run one step, from forward to optimizer step."""
        loss = cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    parser = make_parser("ddp_step", __doc__, rounds=40, quick=False)
    parser.add_argument("--warmup", type=int, default=5, help="steps before, not timed")
    parser.add_argument("--batch", type=int, default=1, help="sequences of 128 tokens per rank")
    parser.add_argument("--without", default="", help=f"candidates to leave out: {', '.join(WORDS)}")
    args = parser.parse_args(argv)
    args.without = {WORDS[word] for word in check_names("candidate", split(args.without), WORDS)}
    return args


def run(args: argparse.Namespace) -> None:
    """Time all candidates on the ranks of the job."""
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
        candidates = {name: Candidate(model, each) for name, each in attach.items() if name not in args.without}
        announce(f"timing {len(candidates)} candidates", job.comm)
        turns = {name: partial(turn, job.comm, one, args.batch) for name, one in candidates.items()}
        seconds = interleave(turns, args.rounds, warmup=args.warmup, comm=job.comm, what="rounds")
        stream = stream_rate(job.comm)
    losses = {name: one.losses for name, one in candidates.items()}
    gathered, all_losses = zip(*job.comm.all_gather_object((seconds, losses)))
    if job.rank == 0:
        times, drift = summaries(gathered), differences(all_losses[:1], TORCH, without=(ALONE, TORCH_VIEWS))
        report(args, job.size, times, drift.get(OURS, 0.0), gradient_bytes, stream)


def turn(comm: Communicator, one: Candidate, batch: int, number: int) -> float:
    """Return the seconds of a step that all ranks start together, on tokens of the rank and the step. Collective."""
    generator = torch.Generator().manual_seed(1000 * number + comm.rank)
    tokens = torch.randint(256, (batch, CONTEXT + 1), generator=generator)
    return timed(lambda: one.step(tokens), comm)


def stream_rate(comm: Communicator) -> float:
    """Return the bytes/s (read + written) that one core copies while all ranks do, on the slowest rank. Collective."""
    source, target = torch.ones(STREAM_BYTES // 4), torch.ones(STREAM_BYTES // 4)
    seconds = [timed(lambda: target.copy_(source), comm) for _ in range(15)]
    return 2 * STREAM_BYTES / statistics.median(slowest(comm.all_gather_object(seconds)))


def report(
    args: argparse.Namespace, ranks: int, times: Times, drift: float, gradient_bytes: int, stream: float
) -> None:
    """Print ratios first, then times; write all of it."""
    score = None
    if ALONE in times and OURS in times:
        score = (times[ALONE]["median"] + 2 * gradient_bytes / stream) / times[OURS]["median"]
    speedups = {name: value for name in (TORCH, TORCH_VIEWS) if (value := ratio(times, name, OURS)) is not None}
    found: list[Target] = list(at_least("score (no-sync step + 2S/B) / step", score, TARGET_SCORE))
    found += [Target(f"step: {name} / {OURS}", value, TARGET_SPEEDUP) for name, value in speedups.items()]
    content: Mapping[str, Any] = {
        "benchmark": "ddp-step",
        "score": score,
        "speedups": speedups,
        "targets": targets_json(found),
        "largest_relative_loss_difference": drift,
        "gradient_bytes": gradient_bytes,
        "stream_bytes_per_second": stream,
        "batch_per_rank": args.batch,
        "seconds": times,
    }
    text = f"{target_table(found)}\n{step_table('step', times)}\n"
    text += f"losses differ from torch's by {drift:.1e} (relative, largest of all steps)\n"
    text += f"S = {gradient_bytes / 1e6:.1f} MB, B = {stream / 1e9:.1f} GB/s per core, {args.rounds} rounds"
    finish(args, f"ddp-step-np{ranks}", content, text, ranks=ranks, launched=True)


if __name__ == "__main__":
    sys.exit(main(parse, run))
