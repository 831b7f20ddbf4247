"""Time of the passes of a batch with pipeline parallelism.

    make -C benchmarks pipeline NP=2

A GPT of eight blocks of width 384, one stage per rank, 8 microbatches of one sequence of 128 bytes
each (4 where a name says so), one thread per rank, no optimizer step. In one run, on the same
batches, partitions and weights: one rank that computes all microbatches alone, while the others
wait; hpctrain's schedules; torch.distributed.pipelining on gloo. The candidates are interleaved in
random order; all ranks start each step together; the time of a step is that of the slowest rank.

    ideal / measured

is the fraction of the measured time that a schedule needs if every pass takes the median time of
its kind and chunk in the same run, and messages take no time. It is 1 if the pipeline itself has no
overhead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import turns
from comm.peers import process_group
from comm.place import Place
from harness import guarded, milliseconds, mpi_name, mpi_slug, provenance, slowest, summary, table, write
from piping import plot
from piping.candidates import make
from piping.check import Found, drift
from piping.ideal import Held, Ranks, hold, seconds, timeline
from piping.names import ALONE, CANDIDATES, FEW_ONE_F_ONE_B, FEW_ZERO_BUBBLE, INTERLEAVED, MANY, OURS, TORCH, WORDS
from piping.targets import targets
from piping.task import FULL, SMALL, Task
from piping.timing import take_turns
from saving.report import print_targets, targets_json
from saving.targets import Target

import hpctrain
from hpctrain.errors import UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.pipeline import schedules
from hpctrain.parallel.pipeline.timeline import Timeline

ROUNDS, WARMUP = 15, 2
DRAWN = (FEW_ONE_F_ONE_B, FEW_ZERO_BUBBLE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints and writes. Return the exit code."""
    return guarded(lambda: run(parse(argv)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    return turns.parse("pipeline.py", __doc__, argv, rounds=ROUNDS, words=WORDS, candidates=CANDIDATES)


def run(args: argparse.Namespace) -> None:
    """Measure all candidates on the ranks of the job."""
    job = hpctrain.init(device="cpu")
    if job.size < 2:
        raise UsageError("one rank is no pipeline: make -C benchmarks pipeline starts two", everywhere=True)
    torch.set_num_threads(1)
    task = SMALL if args.quick else FULL
    needs_torch = any(name in TORCH for name in args.names)
    with process_group(Place(job.comm, job.device, torch.float32)) if needs_torch else nullcontext():
        candidates = make(args.names, task, job.comm)
        if job.rank == 0:
            print(f"timing {len(candidates)} candidates ...", file=sys.stderr, flush=True)
        found = drift(job.comm, candidates, task)
        everyone = job.comm.all_gather_object(take_turns(job.comm, candidates, task, WARMUP, args.rounds))
    if job.rank:
        return
    steps: dict[str, list[Ranks]] = {name: list(zip(*(rank[name] for rank in everyone))) for name in args.names}
    times = {name: summary(slowest([[step.seconds for step in rank[name]] for rank in everyone])) for name in steps}
    held = {name: hold(_schedule(name, job.size), steps[name]) for name in steps if name in OURS}
    reached = list(targets(times, held, found))
    content = {
        "benchmark": "pipeline",
        "ranks": job.size,
        "mpi": mpi_name(),
        "quick": args.quick,
        "task": {**asdict(task), "parameters": sum(each.numel() for each in task.model().parameters())},
        "cuts": _cuts(task, job.size, args.names),
        "targets": targets_json(reached),
        "seconds": times,
        "schedules": {name: {**asdict(one), "efficiency": one.efficiency} for name, one in held.items()},
        "relative_differences_from_one_rank": {name: asdict(one) for name, one in found.items()},
        "provenance": provenance(job.size, mpi_name()),
    }
    drawn = {name: _typical(steps[name]) for name in DRAWN if name in held}
    report(content, reached, held, found, drawn, args)


def _schedule(name: str, ranks: int) -> schedules.Schedule:
    """Return the schedule of an hpctrain candidate."""
    called, microbatches = OURS[name]
    return schedules.make(called, ranks, microbatches, _chunks(name))


def _chunks(name: str) -> int:
    return ParallelSettings(pipe=2, schedule=OURS[name][0]).chunks_a_rank


def _cuts(task: Task, ranks: int, names: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the layers of each chunk of the model, for the common partition and for the interleaved schedule."""
    found = {"stages": task.cuts(ranks)}
    if INTERLEAVED in names:
        found[INTERLEAVED] = task.cuts(ranks * _chunks(INTERLEAVED))
    return found


def _typical(steps: Sequence[Ranks]) -> Timeline:
    """Return the timeline of the step with the median time."""
    return timeline(sorted(steps, key=seconds)[len(steps) // 2])


def report(
    content: dict[str, Any],
    reached: Sequence[Target],
    held: Mapping[str, Held],
    found: Mapping[str, Found],
    drawn: Mapping[str, Timeline],
    args: argparse.Namespace,
) -> None:
    """Print, write and plot a result."""
    name = f"pipeline-np{content['ranks']}-{mpi_slug()}"
    paths = [write(name, content, args.results), *plot.draw(content, drawn, args.results / name)]
    if args.json:
        print(json.dumps(content, indent=2))
        return
    print(f"\n{plot.title(content)}\n")
    print_targets(reached)
    rows = [["step", "median ms", "quartile 1", "quartile 3", "min", "times one rank", "loss differs", "gradients"]]
    alone = content["seconds"].get(ALONE)
    counts = {each: count for each, (_, count) in OURS.items()}
    for each, time in content["seconds"].items():
        share = counts.get(each, MANY) / MANY
        ratio = f"{alone['median'] * share / time['median']:.2f}" if alone else ""
        rows.append([each, *milliseconds(time), ratio, f"{found[each].loss:.0e}", f"{found[each].norm:.0e}"])
    print(table(rows) + "\n")
    if held:
        print(_lost(held) + "\n")
    print("written to " + ", ".join(str(path) for path in paths))


def _lost(held: Mapping[str, Held]) -> str:
    """Return a table of the losses of schedules, by cause."""
    head = ["schedule", "ideal ms", "ideal / measured", "played / measured", "bubble", "simulated", "(p-1)/(m+p-1)"]
    rows = [[*head, "rest of each rank"]]
    for name, one in held.items():
        bubble = one.bubble
        shares = [f"{share:.1%}" for share in (bubble.measured, bubble.simulated)]
        formula = "" if bubble.formula is None else f"{bubble.formula:.1%}"
        rest = " ".join(f"{each.rest:.1%}" for each in one.shares)
        cells = [f"{one.ideal * 1e3:.1f}", f"{one.efficiency:.3f}", f"{one.played:.3f}"]
        rows.append([name, *cells, *shares, formula, rest])
    return table(rows)


if __name__ == "__main__":
    sys.exit(main())
