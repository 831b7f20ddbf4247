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
import gc
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.plot import bars, save, save_figure, step_bars
from harness.ranks import process_group, start
from harness.report import Target, at_least, at_most, step_table, table, target_table
from harness.run import finish, main, make_parser, parse_candidates
from harness.stats import Times, ratio, slowest, summary
from harness.turns import announce, interleave, no_garbage_collection
from pipeline_candidates import FULL, MANY, OURS, SMALL, TORCH, WORDS, Alone, Candidate, Name, Task, make
from pipeline_ideal import Ranks, ScheduleCost, Step, compare, timeline

from hpctrain import trace
from hpctrain.comm.communicator import Communicator
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.pipeline import schedules
from hpctrain.parallel.pipeline.render import figure as timeline_figure
from hpctrain.parallel.pipeline.timeline import Timeline, TimelineSpan
from hpctrain.train.profile.record import clock_offsets

ROUNDS, WARMUP = 15, 2
DRAWN = (Name.FEW_ONE_F_ONE_B, Name.FEW_ZERO_BUBBLE)  # schedules whose timelines are drawn
EFFICIENCY_TARGET, TORCH_TARGET = 0.93, 1.0
DRIFT_TARGET = 1e-5  # relative


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return parse_candidates(make_parser("pipeline", __doc__, rounds=ROUNDS, least=2), argv, WORDS, Name)


def run(args: argparse.Namespace) -> None:
    job = start("pipeline")
    torch.set_num_threads(1)
    task, comm = SMALL if args.quick else FULL, job.comm
    with process_group(comm, needed=bool(set(args.names) & set(TORCH))):
        candidates = {name: make(name, task, comm) for name in args.names}
        announce(f"timing {len(candidates)} candidates", comm)
        drift = differences(comm, candidates, task)
        ahead = clock_offsets(comm)[comm.rank]
        turns = {name: partial(timed_step, comm, one, task, ahead) for name, one in candidates.items()}
        own = interleave(turns, args.rounds, warmup=WARMUP, comm=comm, what="rounds")
        everyone = comm.all_gather_object(own)
    if job.rank:
        return
    steps: dict[str, list[Ranks]] = {
        name: list(zip(*(rank[name] for rank in everyone))) for name in args.names if own[name]
    }
    times = {name: summary(slowest([[step.seconds for step in rank[name]] for rank in everyone])) for name in steps}
    found = {name: compare(_schedule(name, job.size), steps[name]) for name in steps if name in OURS}
    reached = list(targets(times, found, drift))
    cuts = {"stages": task.cuts(job.size)}  # the layers of each chunk of the model
    if Name.INTERLEAVED in args.names:
        cuts[Name.INTERLEAVED] = task.cuts(job.size * _chunks(Name.INTERLEAVED))
    content = {
        "task": {**asdict(task), "parameters": sum(each.numel() for each in task.model().parameters())},
        "cuts": cuts,
        "seconds": times,
        "schedules": {name: {**asdict(one), "efficiency": one.efficiency} for name, one in found.items()},
        "relative_differences_from_one_rank": drift,
    }
    typical: dict[str, Timeline] = {name: _typical(steps[name]) for name in DRAWN if name in found}
    lines = [f"\n{title({**content, 'ranks': job.size})}\n", target_table(reached), tables(times, found, drift)]
    finish(args, "pipeline", content, lines, job=job, found=reached, draw=partial(draw, timelines=typical))


def timed_step(comm: Communicator, one: Candidate, task: Task, ahead: float, number: int) -> Step:
    """Run a step of a candidate; return its time and spans, by rank 0's clock. Collective."""
    batch = task.batch(number, one.microbatches)
    one.model.zero_grad()
    gc.collect()
    with no_garbage_collection():
        comm.barrier()
        trace.start()
        try:
            started = time.monotonic()
            one.step(*batch)
            ended = time.monotonic()
        finally:
            recorded = trace.take()
    spans = (
        TimelineSpan(one.name, one.start - ahead, one.end - ahead, one.facts.get("chunk"), one.facts.get("microbatch"))
        for one in recorded.spans
    )
    return Step(started - ahead, ended - ahead, tuple(sorted(spans, key=lambda one: (one.start, -one.end))))


LossAndNorm = dict[str, float]  # "loss" of a batch, and "norm" of all its gradients


def differences(comm: Communicator, candidates: Mapping[str, Candidate], task: Task) -> dict[str, LossAndNorm]:
    """Return the relative difference of each candidate from a single rank, before any is timed. Collective."""
    counts = sorted({one.microbatches for one in candidates.values()})
    truth = {count: find(comm, Alone(task, comm, count), task) for count in counts}
    found = {}
    for name, one in candidates.items():
        value, right = find(comm, one, task), truth[one.microbatches]
        found[name] = {what: abs(value[what] - right[what]) / abs(right[what]) for what in right}
    return found


def find(comm: Communicator, one: Candidate, task: Task) -> LossAndNorm:
    """Return a candidate's result for a batch; if ranks differ, the loss furthest from the mean."""
    one.model.zero_grad()
    loss = one.step(*task.batch(-1, one.microbatches))
    gradients = [parameter.grad for parameter in one.model.parameters() if parameter.grad is not None]
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
    everyone = comm.all_gather_object((loss, squares))
    losses = [each for each, _ in everyone if each is not None]
    assert losses, "at least one rank has the loss"
    mean = sum(losses) / len(losses)
    norm = math.sqrt(sum(each for _, each in everyone))
    return {"loss": max(losses, key=lambda each: abs(each - mean)), "norm": norm}


def _schedule(name: str, ranks: int) -> schedules.Schedule:
    called, microbatches = OURS[name]
    return schedules.make(called, ranks, microbatches, _chunks(name))


def _chunks(name: str) -> int:
    return ParallelSettings(pipe=2, schedule=OURS[name][0]).chunks_a_rank


def _typical(steps: Sequence[Ranks]) -> Timeline:
    """Return the timeline of the step with the median time, in milliseconds."""
    found = timeline(sorted(steps, key=lambda ranks: max(step.seconds for step in ranks))[len(steps) // 2])
    rows = (tuple(replace(span, start=span.start * 1e3, end=span.end * 1e3) for span in row) for row in found.rows)
    return Timeline(tuple(rows))


# Output ---------------------------------------------------------------------------------------------------------------


def targets(times: Times, found: Mapping[str, ScheduleCost], drift: Mapping[str, LossAndNorm]) -> Iterator[Target]:
    if Name.ONE_F_ONE_B in found:
        yield Target(f"{Name.ONE_F_ONE_B}: ideal / measured", found[Name.ONE_F_ONE_B].efficiency, EFFICIENCY_TARGET)
    if Name.FEW_ONE_F_ONE_B in found and Name.FEW_ZERO_BUBBLE in found:
        zero, one = found[Name.FEW_ZERO_BUBBLE], found[Name.FEW_ONE_F_ONE_B]
        yield from at_most(f"{Name.FEW_ZERO_BUBBLE} / {Name.FEW_ONE_F_ONE_B}", zero.measured / one.measured, 1.0)
        yield from at_most(f"{Name.FEW_ZERO_BUBBLE} / ideal 1f1b", zero.measured / one.ideal, 1.0)
    for theirs, ours in ((Name.TORCH_GPIPE, Name.GPIPE), (Name.TORCH_ONE_F_ONE_B, Name.ONE_F_ONE_B)):
        yield from at_least(f"step: {theirs} / {ours}", ratio(times, theirs, ours), TORCH_TARGET)
    for what, words in (("loss", "losses"), ("norm", "norms of gradients")):
        value = max((one[what] for one in drift.values()), default=None)
        yield from at_most(f"{words}: furthest from {Name.ALONE}, relative", value, DRIFT_TARGET)


def tables(times: Times, found: Mapping[str, ScheduleCost], drift: Mapping[str, LossAndNorm]) -> str:
    """Return a table of the steps, and one of the losses of schedules by cause."""
    shares = {name: OURS.get(name, ("", MANY))[1] / MANY for name in times}
    alone = times.get(Name.ALONE)
    more = {
        "times one rank": (
            {name: f"{alone['median'] * shares[name] / times[name]['median']:.2f}" for name in times} if alone else {}
        ),
        "loss differs": {name: f"{one['loss']:.0e}" for name, one in drift.items()},
        "gradients": {name: f"{one['norm']:.0e}" for name, one in drift.items()},
    }
    head = ["schedule", "ideal ms", "ideal / measured", "played / measured", "bubble", "simulated", "(p-1)/(m+p-1)"]
    rows = [[*head, "rest of each rank"]]
    for name, one in found.items():
        cells = [f"{one.ideal * 1e3:.1f}", f"{one.efficiency:.3f}", f"{one.played:.3f}"]
        cells += ["" if share is None else f"{share:.1%}" for share in one.bubble.values()]
        rows.append([name, *cells, " ".join(f"{each['rest']:.1%}" for each in one.shares)])
    return step_table("step", times, more) + (f"\n{table(rows)}\n" if found else "")


def draw(result: dict[str, Any], path: Path, timelines: Mapping[str, Timeline] | None = None) -> list[Path]:
    """Draw the time of a step per candidate with its ideal, and timelines, in milliseconds, by schedule."""
    times = result["seconds"]

    def fill(figure: Any) -> None:
        axes, rows = figure.subplots(), step_bars(times, own=[Name.ALONE])
        ideals = {name: one["ideal"] * 1e3 for name, one in result["schedules"].items()}
        rows = [
            replace(one, text=f"{one.text}   ({ideals[one.name]:.0f} ideal)") if one.name in ideals else one
            for one in rows
        ]
        bars(axes, rows, "ms per step, slowest rank (bar: median; line: quartiles; upright mark: ideal)")
        for place, one in enumerate(rows):
            if one.name in ideals:
                for colour, width, order in (("white", 3, 4), ("black", 1.2, 5)):
                    ends = [place - 0.4, place + 0.4]
                    axes.plot([ideals[one.name]] * 2, ends, color=colour, linewidth=width, zorder=order)
        axes.set_title(title(result), loc="left", fontsize=11, fontweight="bold")

    files = save(path, (8, 0.36 * len(times) + 1.1), fill)
    for name, drawn in (timelines or {}).items() if files else ():
        words = name.replace("hpctrain ", "").replace("m=", "m = ")
        picture = partial(timeline_figure, drawn, f"{words}, measured", unit="ms")
        files += save_figure(picture, path.with_name(f"{path.name}-{words.split()[0]}"))
    return files


def title(result: Mapping[str, Any]) -> str:
    task = result["task"]
    shape = f"GPT of {task['layers']} layers, width {task['width']}, on {result['ranks']} ranks"
    return f"{shape}, microbatches of {task['context']} tokens"


if __name__ == "__main__":
    sys.exit(main(parse, run))
