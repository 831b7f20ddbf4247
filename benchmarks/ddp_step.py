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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import milliseconds, mpi_name, provenance, slowest, summary, table, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hpctrain
from hpctrain.models.build import build
from hpctrain.models.settings import ModelSettings

CONTEXT = 128
TARGET_SCORE = 0.95
TARGET_SPEEDUP = 1.2
STREAM_BYTES = 64 * 2**20


class Candidate:
    """Training setup of the same model, and its timings."""

    def __init__(self, model: nn.Module, attach: Callable[[nn.Module], nn.Module]) -> None:
        self.model = attach(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Run one step, from forward to optimizer step."""
        loss = cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


def main() -> None:
    """Run the benchmark; rank 0 prints and writes."""
    args = parse()
    job = hpctrain.init(device="cpu")
    torch.manual_seed(0)
    model = build(ModelSettings(name="gpt-mini", context=CONTEXT), vocab_size=256)
    gradient_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        store = job.comm.broadcast_object(f"{folder}/store")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=job.rank, world_size=job.size)
        candidates = make(model, job)
        generator = torch.Generator().manual_seed(job.rank)
        for round_number in range(args.warmup + args.rounds):
            tokens = torch.randint(256, (args.batch, CONTEXT + 1), generator=generator)
            for candidate in candidates.values():
                job.comm.barrier()
                started = time.perf_counter()
                candidate.step(tokens[:, :-1], tokens[:, 1:])
                if round_number >= args.warmup:
                    candidate.seconds.append(time.perf_counter() - started)
        stream = stream_rate(job)
        job.comm.barrier()
        dist.destroy_process_group()
    gathered = job.comm.all_gather_object({name: candidate.seconds for name, candidate in candidates.items()})
    if job.rank == 0:
        report(job, candidates, gathered, gradient_bytes, stream, args)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each candidate")
    parser.add_argument("--warmup", type=int, default=5, help="steps before, not timed")
    parser.add_argument("--batch", type=int, default=1, help="sequences of 128 tokens per rank")
    return parser.parse_args()


def make(model: nn.Module, job: Any) -> dict[str, Candidate]:
    """Return the candidates, each with its own copy of the model."""
    ddp = nn.parallel.DistributedDataParallel
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "no synchronisation": lambda module: module,
        "torch DDP + gloo": ddp,
        "torch DDP + gloo, bucket views": lambda module: ddp(module, gradient_as_bucket_view=True),
        "hpctrain DDP": job.wrap,
    }
    return {name: Candidate(copy.deepcopy(model), way) for name, way in ways.items()}


def stream_rate(job: Any) -> float:
    """Return the bytes/s (read + written) that one core copies while all ranks do, on the slowest rank."""
    source, target = torch.ones(STREAM_BYTES // 4), torch.ones(STREAM_BYTES // 4)
    seconds = []
    for _ in range(15):
        job.comm.barrier()
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    times = slowest(job.comm.all_gather_object(seconds))
    return 2 * STREAM_BYTES / summary(times)["median"]


def report(
    job: Any,
    candidates: dict[str, Candidate],
    gathered: list[dict[str, list[float]]],
    gradient_bytes: int,
    stream: float,
    args: argparse.Namespace,
) -> None:
    """Print ratios first, then times; write all of it."""
    times = {name: summary(slowest([rank[name] for rank in gathered])) for name in candidates}
    ideal = times["no synchronisation"]["median"] + 2 * gradient_bytes / stream
    ours = times["hpctrain DDP"]["median"]
    score = ideal / ours
    speedups = {name: times[name]["median"] / ours for name in times if name.startswith("torch")}
    drift = max(
        abs(a - b) / abs(b) for a, b in zip(candidates["hpctrain DDP"].losses, candidates["torch DDP + gloo"].losses)
    )
    print(f"score (no-sync step + 2S/B) / step       {score:.3f}   (target {TARGET_SCORE})")
    for name, speedup in speedups.items():
        print(f"times {name:<34} {speedup:.2f}   (target {TARGET_SPEEDUP})")
    print(f"losses differ from torch's by            {drift:.1e}   (relative, largest of all steps)\n")
    rows = [["step", "median ms", "quartile 1", "quartile 3", "min"]]
    rows += [[name, *milliseconds(time)] for name, time in times.items()]
    print(table(rows))
    print(f"\nS = {gradient_bytes / 1e6:.1f} MB, B = {stream / 1e9:.1f} GB/s per core, {args.rounds} rounds")
    path = write(
        f"ddp-step-np{job.size}",
        {
            "benchmark": "ddp-step",
            "score": score,
            "speedups": speedups,
            "largest_relative_loss_difference": drift,
            "gradient_bytes": gradient_bytes,
            "stream_bytes_per_second": stream,
            "batch_per_rank": args.batch,
            "seconds": times,
            "provenance": provenance(job.size, mpi_name()),
        },
    )
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
