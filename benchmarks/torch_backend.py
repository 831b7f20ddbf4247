"""Time of torch.distributed with the back ends hpctrain and gloo: collectives over sizes, and training steps.

    make -C benchmarks torch-backend NP=2
    make -C benchmarks torch-backend NODES=2 NP=4

In one run, in the same processes: ``init_process_group("hpctrain")``, and a group of the same ranks
with torch's own gloo. Collectives are called through torch.distributed on plain tensors; all_reduce
also on tensors of ``comm.empty``, which are in memory that the ranks of a node share. The same
all_reduce called on hpctrain's communicator shows what torch.distributed adds to a small call.

Steps train a GPT of 10.9 million parameters by stock programs: torch's DistributedDataParallel and
FSDP2 on each of the groups, and the same model without an exchange. The exchange is the difference.

The candidates are interleaved. All ranks start together; a time is that of the slowest rank. All
results of collectives are compared with a reference before and after, untimed. On several nodes, the
targets and sizes are those of torch_backend_nodes.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch_backend_nodes as on_nodes
from communication_candidates import OPERATIONS, Candidate, Operation, Setting, calls_of, check, elements, time_calls
from communication_figures import (
    MEAN_SIZES,
    Figures,
    Row,
    by_size_and_name,
    row_of,
    row_table,
    sizes_of,
    speedup,
)
from harness import plot
from harness.ranks import start
from harness.report import Target, at_least, at_most, mpi_name, mpi_slug, step_table, table, target_table
from harness.run import finish, main, make_parser, parse_names, parse_sizes, split
from harness.stats import ratio, slowest
from harness.turns import announce, interleave, no_garbage_collection, stop
from multinode import link_rates
from torch_backend_candidates import CALLS, Groups, Name, candidates
from torch_backend_steps import Step, Steps, measure_steps

from hpctrain.errors import UsageError
from hpctrain.torch_backend.register import register
from hpctrain.util.plotting import add_grid
from hpctrain.util.text import counted, format_bytes

SIZES = "4,4K,64K,256K,1M,4M,25M,64M"
PARTS = ("collectives", "steps")
ROUNDS = 20
PLAIN_TARGET, EMPTY_TARGET = 4.0, 10.0  # times gloo: geometric means over MEAN_SIZES
OVERHEAD_TARGET = 25e-6  # seconds of a small call above that of the communicator
EXCHANGE_TARGET = 0.5  # times gloo's
STEP_TARGETS = {1: 1.6, 4: 1.4}  # FSDP2: times gloo's step, by the sequences per rank
COLOURS = {Name.GLOO: "#3b8f54", Name.OURS: "#1f5fbf", Name.EMPTY: "#6ba3e8", Name.COMMUNICATOR: "#9a9a9a"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("torch_backend", __doc__, rounds=ROUNDS)
    parser.add_argument(
        "--sizes", default="", help=f"bytes of the whole tensor (default: {SIZES}; on several nodes {on_nodes.SIZES})"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: %(default)s)")
    parser.add_argument("--batches", default="1,4", help="sequences per rank and step (default: %(default)s)")
    args = parser.parse_args(argv)
    args.sizes = parse_sizes(args.sizes or "4,64K") if args.sizes or args.quick else []
    args.parts = parse_names("part", args.parts, PARTS)
    args.batches = [_positive(word) for word in split(args.batches)]
    return args


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise UsageError(f"--batches {word}: give numbers of sequences, at least 1, as in 1,4")
    return int(word)


def run(args: argparse.Namespace) -> None:
    job = start("torch-backend")
    nodes = job.comm.nodes
    args.sizes = args.sizes or parse_sizes(SIZES if nodes == 1 else on_nodes.SIZES)
    register()
    dist.init_process_group("hpctrain")
    groups = Groups.create(job.comm)
    rates = link_rates(job.comm) if nodes > 1 else []
    rows = measure_collectives(groups, args) if "collectives" in args.parts else {}
    steps = measure_steps(groups, args) if "steps" in args.parts else {}
    rates += link_rates(job.comm) if nodes > 1 and not stop.number else []
    dist.destroy_process_group()
    if job.rank:
        return
    figures = {name: by_size_and_name(found) for name, found in rows.items()}
    reductions = figures.get("all_reduce", {})
    links = on_nodes.link_ratios(reductions, nodes, rates) if rates else {}
    found = list(targets(figures, steps) if nodes == 1 else on_nodes.targets(reductions, links, steps))
    content = {
        "nodes": nodes,
        "ratios": {name: ratios_json(each) for name, each in figures.items()},
        "overhead_seconds": overhead(reductions),
        "collectives": rows,
        "steps": {str(batch): step.to_json() for batch, step in steps.items()},
    }
    content |= {"link_ratios": links, "link_bytes_per_second": rates} if rates else {}
    where = f"{counted(job.size, 'rank')} on {counted(nodes, 'node')}"
    lines = [f"\ntorch.distributed, back ends hpctrain and gloo, {where}, {mpi_name()}\n", target_table(found)]
    lines += on_nodes.link_lines(links, rates) if rates else []
    for name, each in figures.items():
        lines += [ratio_table(name, each)]
    lines += [step_lines(batch, step) for batch, step in steps.items()]
    lines += [f"{name}\n{row_table(each)}\n" for name, each in figures.items()]
    file = f"torch-backend-nodes{nodes}-np{job.size}-{mpi_slug()}" if nodes > 1 else ""
    finish(args, "torch-backend", content, lines, job=job, file=file, found=found, draw=draw)


# Measurement ----------------------------------------------------------------------------------------------------------


def measure_collectives(groups: Groups, args: argparse.Namespace) -> dict[str, list[Row]]:
    """Return a row per operation, size and candidate. Collective."""
    found: dict[str, list[Row]] = {}
    for name in CALLS:
        rows: list[Row] = []
        for nbytes in reversed(args.sizes):  # the largest first: smaller sizes use the beginning of its memory
            if not stop.number:
                announce(f"{name} {format_bytes(nbytes)}", groups.setting.comm)
                rows = measure_size(groups, OPERATIONS[name], nbytes, args.rounds) + rows
        found[name] = rows
    return found


def measure_size(groups: Groups, operation: Operation, nbytes: int, rounds: int) -> list[Row]:
    """Return a row per candidate. Collective."""
    setting = groups.setting
    numel, calls = elements(nbytes, setting.dtype.itemsize, setting.size if operation.shared else 1), calls_of(nbytes)
    able = list(candidates(groups, operation, numel))
    for candidate in able:
        check(setting, operation, candidate)
    turns = {one.name: partial(_turn, setting, one, calls) for one in able}
    with no_garbage_collection():
        own = interleave(turns, rounds, comm=setting.comm, rotate=True, every={one.name: one.every for one in able})
    for candidate in able:  # repeat the check: the results after timing must still be right
        check(setting, operation, candidate)
    gathered = setting.comm.all_gather_object(own)
    figures = {"ranks": setting.size, "size": numel * setting.dtype.itemsize, "calls": calls}
    return [
        row_of(operation.name, one.name, one.nbytes, seconds, **figures)
        for one in able
        if (seconds := slowest([times[one.name] for times in gathered]))
    ]


def _turn(setting: Setting, candidate: Candidate, calls: int, _: int) -> float:
    return time_calls(setting, candidate.call, calls)


# Figures --------------------------------------------------------------------------------------------------------------


def mean_ratio(figures: Figures, name: str) -> float | None:
    """Return the geometric mean of gloo's times relative to a candidate's; None if a size is missing."""
    values = [value for size in MEAN_SIZES if (value := speedup(figures, size, name, Name.GLOO)) is not None]
    return statistics.geometric_mean(values) if len(values) == len(MEAN_SIZES) else None


def overhead(figures: Figures) -> float | None:
    """Return the seconds that torch.distributed adds to the smallest call of the communicator."""
    size = min(sizes_of(figures), default=0)
    ours, plain = figures.get((size, Name.OURS)), figures.get((size, Name.COMMUNICATOR))
    return float(ours["median"] - plain["median"]) if ours and plain else None


def targets(figures: Mapping[str, Figures], steps: Mapping[int, Step]) -> Iterator[Target]:
    """Yield the targets for which the run has figures."""
    reductions = figures.get("all_reduce", {})
    sizes = "mean of 64K,1M,4M,25M,64M"
    yield from at_least(
        f"all_reduce of plain tensors: gloo / hpctrain, {sizes}", mean_ratio(reductions, Name.OURS), PLAIN_TARGET
    )
    yield from at_least(
        f"all_reduce of comm.empty: gloo / hpctrain, {sizes}", mean_ratio(reductions, Name.EMPTY), EMPTY_TARGET
    )
    added = overhead(reductions)
    yield from at_most(
        "small call: us above the communicator's", None if added is None else added * 1e6, OVERHEAD_TARGET * 1e6
    )
    for batch, step in steps.items():
        yield from at_most(f"DDP exchange, batch {batch}: hpctrain / gloo", step.exchange_ratio, EXCHANGE_TARGET)
        value = ratio(step.seconds, Steps.FSDP_GLOO, Steps.FSDP)
        yield from at_least(f"FSDP2 step, batch {batch}: gloo / hpctrain", value, STEP_TARGETS.get(batch, 1.0))


def ratios_json(figures: Figures) -> dict[str, dict[str, float]]:
    """Return gloo's time relative to that of each other candidate, by name and size."""
    found: dict[str, dict[str, float]] = {}
    for name in (Name.OURS, Name.EMPTY):
        values = {str(size): speedup(figures, size, name, Name.GLOO) for size in sizes_of(figures)}
        if any(values.values()):
            found[name] = {size: value for size, value in values.items() if value is not None}
    return found


def ratio_table(operation: str, figures: Figures) -> str:
    """Return how many times faster than gloo, by size."""
    ratios = ratios_json(figures)
    rows = [["size", *(f"gloo / {name}" for name in ratios)]]
    for size in sizes_of(figures):
        rows.append([format_bytes(size), *(f"{each[str(size)]:.2f}" for each in ratios.values())])
    return f"{operation}: times as fast (medians)\n{table(rows)}\n"


def step_lines(batch: int, step: Step) -> str:
    """Return the ratios, then the times of the steps of one batch."""
    rows = [["", "gloo / hpctrain"]]
    rows += [[name, f"{value:.2f}"] for name, value in step.ratios.items()]
    drift = max(step.drift.values(), default=0.0)
    title = f"steps of {batch} x {step.context} tokens per rank"
    losses = f"losses differ from those on gloo by {drift:.1e} (relative, largest of all steps)"
    return f"{title}\n{table(rows)}\n\n{step_table('step', step.seconds)}{losses}\n"


# Picture --------------------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the time of each collective over the size, and that of a step per candidate."""
    collectives, steps = result["collectives"], result["steps"]
    panels = len(collectives) + len(steps)
    columns = min(panels, 3)

    def fill(figure: Any) -> None:
        axes = iter(figure.subplots(-(-panels // columns), columns, squeeze=False).flat)
        for name, rows in collectives.items():
            _lines(next(axes), name, rows)
        for batch, step in steps.items():
            title = f"A step, {batch} x {step['context']} tokens per rank"
            plot.bars(next(axes), plot.step_bars(step["seconds"], own=[Steps.ALONE]), "ms, median and quartiles", title)
        for spare in axes:
            spare.set_axis_off()
        where = f"{counted(result['ranks'], 'rank')} on {counted(result['nodes'], 'node')}"
        title = f"torch.distributed on hpctrain and on gloo, {where}, {result['mpi']}"
        figure.suptitle(title, fontsize=13, fontweight="bold")

    return plot.save(path, (5.0 * columns, 4.2 * -(-panels // columns)), fill)


def _lines(axes: Any, title: str, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    for name, colour in COLOURS.items():
        points = [(row["size"], row["median"] * 1e6) for row in rows if row["candidate"] == name]
        if points:
            axes.plot(*zip(*sorted(points)), label=name, color=colour, marker="o", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row["size"] for row in rows})
    axes.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=35, ha="right")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9f}".rstrip("0").rstrip(".")))
    axes.set_ylabel("microseconds, median")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(fontsize=8, frameon=False)
    add_grid(axes, **plot.GRID)


if __name__ == "__main__":
    sys.exit(main(parse, run))
