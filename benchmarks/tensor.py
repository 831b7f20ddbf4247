"""Time of a training step of MLP blocks with tensor parallelism.

    make -C benchmarks tensor NP=2

Eight blocks of width 512, four times as wide inside, on 512 tokens. In one run, on the same batches
and first weights: one rank that trains them alone, while the others wait; hpctrain's column- and
row-parallel layers; torch's DTensor tensor parallelism on gloo. The candidates are interleaved in
random order; all ranks start each step together; the time of a step is that of the slowest rank.
The score is

    (step of one rank alone / ranks + all_reduces alone) / step

where "all_reduces alone" is the measured time of the same reductions, one forward and one backward
per block, in sequence without other work: the minimum cost of communication here. The actual number
of reductions per step is counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import turns
from comm.peers import process_group
from comm.place import Place
from harness import guarded, milliseconds, mpi_name, mpi_slug, provenance, slowest, summary, table, write
from saving.report import print_targets, targets_json
from splitting import plot
from splitting.candidates import make
from splitting.names import ALONE, CANDIDATES, DTENSOR, OURS
from splitting.targets import targets
from splitting.task import FULL, SMALL
from splitting.timing import count, take_turns

import hpctrain
from hpctrain.errors import UsageError

ROUNDS, WARMUP = 20, 3
WORDS = {"alone": ALONE, "torch-dtensor": DTENSOR}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints and writes. Return the exit code."""
    return guarded(lambda: run(parse(argv)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    return turns.parse("tensor.py", __doc__, argv, rounds=ROUNDS, words=WORDS, candidates=CANDIDATES)


def run(args: argparse.Namespace) -> None:
    """Measure all candidates on the ranks of the job."""
    job = hpctrain.init(device="cpu")
    if job.size < 2:
        raise UsageError("one rank shares nothing: make -C benchmarks tensor starts two", everywhere=True)
    task = SMALL if args.quick else FULL
    needs_torch = DTENSOR in args.names
    with process_group(Place(job.comm, job.device, torch.float32)) if needs_torch else nullcontext():
        candidates = make(args.names, task, job.comm)
        if job.rank == 0:
            print(f"timing {len(candidates)} candidates ...", file=sys.stderr, flush=True)
        seconds = take_turns(job.comm, candidates, task, WARMUP, args.rounds)
        counts = count(job.comm, candidates, WARMUP + args.rounds)
        losses = {name: one.losses for name, one in candidates.items()}
        optimizers = {name: one.optimizer_name for name, one in candidates.items()}
        gathered, all_losses, all_counts = zip(*job.comm.all_gather_object((seconds, losses, counts)))
    if job.rank == 0:
        times = {name: summary(slowest([rank[name] for rank in gathered])) for name in gathered[0]}
        most = {part: max(one[part] for one in all_counts) for part in counts}
        found = list(targets(times, most, task, job.size))
        content = {
            "benchmark": "tensor",
            "ranks": job.size,
            "mpi": mpi_name(),
            "quick": args.quick,
            "task": asdict(task),
            "targets": targets_json(found),
            "seconds": times,
            "optimizers": optimizers,
            "reductions": most,
            "bytes_a_reduction": 4 * task.message,
            "largest_relative_loss_differences": differences(all_losses),
            "provenance": provenance(job.size, mpi_name()),
        }
        report(content, found, args)


def differences(gathered: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Return the largest relative difference of losses from those of one rank alone, over all ranks and steps."""
    alone = gathered[0].get(ALONE)
    if alone is None:
        return {}
    names = [name for name in gathered[0] if name != ALONE]
    return {
        name: max(abs(a - b) / abs(b) for rank in gathered for a, b in zip(rank[name], alone, strict=True))
        for name in names
    }


def report(content: dict[str, Any], found: Sequence[Any], args: argparse.Namespace) -> None:
    """Print, write and plot a result."""
    name = f"tensor-np{content['ranks']}-{mpi_slug()}"
    paths = [write(name, content, args.results), *plot.draw(content, args.results / name)]
    if args.json:
        print(json.dumps(content, indent=2))
        return
    print(f"\n{plot.title(content)}\n")
    print_targets(found)
    rows = [["step", "median ms", "quartile 1", "quartile 3", "min", f"/ {OURS}", "optimizer"]]
    for each, time in content["seconds"].items():
        ratio = f"{time['median'] / content['seconds'][OURS]['median']:.2f}"
        rows.append([each, *milliseconds(time), ratio, content["optimizers"].get(each, "")])
    print(table(rows) + "\n")
    for each, value in content["largest_relative_loss_differences"].items():
        print(f"losses of {each} differ from those of one rank by at most {value:.1e} (relative)")
    print("written to " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    sys.exit(main())
