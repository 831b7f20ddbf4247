"""Time of one operation over sizes: hpctrain, the MPI library and torch.distributed, in one run on the same ranks.

    mpiexec -n 2 python benchmarks/communication.py all_reduce --sizes 4,64K,1M,4M,25M,64M

The candidates are interleaved. A repeat begins with a barrier and consists of several calls,
depending on the size; its figure is the mean of them, on the slowest rank. All results are compared
with a reference before and after, untimed. During timing, tensors are zero: their sum stays zero
after any number of calls, so that no value overflows. Tensors also need no refill, which would
change the contents of the caches. gloo takes part in one of four rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from communication_candidates import (
    OPERATIONS,
    PEERS,
    STREAM_SIZE,
    Candidate,
    Name,
    Operation,
    Setting,
    calls_of,
    check,
    elements,
    own_candidates,
    time_calls,
    torch_candidates,
    twin_name,
)
from communication_figures import Row, by_size_and_name, draw, ratio_tables, ratios_json, row_of, row_table, targets
from communication_library import lack_of_library, library_candidates
from harness.ranks import process_group, refuse, start
from harness.report import Target, left_out_lines, mpi_name, mpi_slug, target_table
from harness.run import finish, hidden, main, make_parser, parse_sizes, split
from harness.stats import slowest
from harness.turns import announce, interleave, no_garbage_collection, stop

from hpctrain.errors import UsageError
from hpctrain.util.text import counted, format_bytes

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
SIZES = "4,256,4K,64K,1M,4M,25M,64M"
OVERLAP_SIZES = "64K,1M,4M,25M"  # shorter messages cannot overlap with one unit of compute
ROUNDS = 40
KNOWN = (Name.OURS, f"{Name.OURS} and an algorithm", Name.OUTSIDE, *PEERS)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("communication", __doc__, rounds=ROUNDS, quick=False)
    parser.add_argument("operation", choices=[*OPERATIONS, "overlap"], help=hidden("what to measure"))
    usual = f"{SIZES} (overlap: {OVERLAP_SIZES})"
    parser.add_argument("--sizes", default="", help=f"bytes of the whole tensor, in whole elements; default: {usual}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--algorithms", default="", help="of hpctrain, as in auto,window,ring; default: auto")
    parser.add_argument("--without", default="", help="candidates to leave out, as in gloo,hpctrain outside")
    parser.add_argument("--oversubscribe", action="store_true", help="let ranks share a GPU")
    args = parser.parse_args(argv)
    args.sizes = parse_sizes(args.sizes or (OVERLAP_SIZES if args.operation == "overlap" else SIZES))
    args.without, args.algorithms = split(args.without), split(args.algorithms)
    for name in args.without:
        if name not in PEERS and not name.startswith(Name.OURS):
            raise UsageError(f"no candidate is called {name!r}: known are {', '.join(KNOWN)}")
    return args


def run(args: argparse.Namespace) -> None:
    job = start(args.operation, device=args.device, oversubscribe=args.oversubscribe)
    if args.operation == "pingpong" and job.size != 2:
        refuse(f"pingpong is between 2 ranks, not {job.size}: set NP=2")
    algorithms = args.algorithms or ["auto"]
    setting = Setting(job.comm, job.device, getattr(torch, args.dtype), algorithms, bool(args.algorithms))
    if args.operation == "overlap":
        import communication_overlap

        measure: Callable[..., Any] = communication_overlap.measure
    else:
        measure = partial(measure_size, operation=OPERATIONS[args.operation])
    with process_group(job.comm, "nccl" if job.device.type == "cuda" else "gloo"):
        rows, unable = measure_sizes(setting, args, measure)
    if job.rank:
        return
    content: dict[str, Any] = {"nodes": setting.comm.nodes, "dtype": args.dtype, "device": args.device}
    found: list[Target] | None = None
    if args.operation == "overlap":
        text = [communication_overlap.overlap_table(rows)]
    else:
        figures = by_size_and_name(rows)
        found = list(targets(args.operation, setting.size, figures, twin_name(setting.dtype)))
        content["ratios"] = ratios_json(figures)
        text = [*ratio_tables(figures), target_table(found), row_table(figures)]
    content |= {"rows": rows, "left_out": unable}
    where = f"{counted(setting.size, 'rank')} on {counted(setting.comm.nodes, 'node')}"
    meaning = f"{Name.OURS}: tensors of comm.empty; {Name.OUTSIDE}: any other tensors; "
    meaning += f"{Name.LIBRARY}: {mpi_name()} by mpi4py, in place, one call"
    lines = [f"\n{args.operation}, {where}, {args.dtype}, {args.device}, {mpi_name()}\n", *text, f"\n{meaning}"]
    lines += left_out_lines(unable)
    finish(args, args.operation, content, lines, job=job, file=_file(args, setting), found=found, draw=draw)


def _file(args: argparse.Namespace, setting: Setting) -> str:
    extra = [word for word, usual in ((args.device, "cpu"), (args.dtype, "float32")) if word != usual]
    nodes = [f"nodes{setting.comm.nodes}"] if setting.comm.nodes > 1 else []
    return "-".join([args.operation.replace("_", "-"), f"np{setting.size}", *nodes, mpi_slug(), *extra])


# Measurement ----------------------------------------------------------------------------------------------------------


def measure_sizes(
    setting: Setting, args: argparse.Namespace, measure: Callable[..., Any]
) -> tuple[list[Any], dict[str, str]]:
    """Return the rows of all sizes, and why candidates could not take part. Collective."""
    rows: list[Any] = []
    unable: dict[str, str] = {}
    for nbytes in reversed(args.sizes):  # the largest first: smaller sizes use the beginning of its memory
        if not stop.number:
            announce(f"{args.operation} {format_bytes(nbytes)}", setting.comm)
            found, problems = measure(setting, nbytes=nbytes, rounds=args.rounds, without=args.without)
            rows, unable = found + rows, unable | problems
    return rows, unable


def copies(setting: Setting, operation: Operation, numel: int) -> Iterator[Candidate]:
    """Yield a copy of the tensor; interleaved with the others, it shows the memory bandwidth with all ranks active."""
    if (
        operation.name == "all_reduce"
        and setting.device.type == "cpu"
        and numel * setting.dtype.itemsize == STREAM_SIZE
    ):
        source, target = setting.plain(numel), setting.plain(numel)
        yield Candidate(Name.COPY, partial(target.copy_, source), [target, source], target)


def able_candidates(
    setting: Setting, operation: Operation, numel: int, without: Sequence[str]
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates that can take part, and the reasons of the others."""
    able = []
    why = lack_of_library(setting, operation)
    unable: dict[str, str] = {Name.LIBRARY: why} if why and Name.LIBRARY not in without else {}
    library = library_candidates(setting, operation, numel) if setting.device.type == "cpu" else ()
    ours, theirs = own_candidates(setting, operation, numel), torch_candidates(setting, operation, numel)
    for candidate in chain(ours, library, theirs):
        if candidate.name in without:
            continue
        if problem := check(setting, operation, candidate):
            unable[candidate.name] = problem
        else:
            able.append(candidate)
    if not able:
        refuse(f"no candidate is left for {operation.name}: {unable or 'all were left out'}")
    return able, unable


def measure_size(
    setting: Setting, operation: Operation, nbytes: int, rounds: int, without: Sequence[str]
) -> tuple[list[Row], dict[str, str]]:
    """Return a row per candidate, and why others could not take part. Collective."""
    numel = elements(nbytes, setting.dtype.itemsize, setting.size if operation.shared else 1)
    able, unable = able_candidates(setting, operation, numel, without)
    calls = calls_of(nbytes)
    taking_part = [*able, *copies(setting, operation, numel)]
    turns = {one.name: partial(lambda call, _: time_calls(setting, call, calls), one.call) for one in taking_part}
    with no_garbage_collection():
        own = interleave(
            turns, rounds, comm=setting.comm, rotate=True, every={one.name: one.every for one in taking_part}
        )
    for candidate in able:  # repeat the check: the results after timing must still be right
        check(setting, operation, candidate)
    gathered = setting.comm.all_gather_object(own)
    rows = []
    for candidate in taking_part:
        if seconds := slowest([times[candidate.name] for times in gathered]):
            figures = {"ranks": setting.size, "size": numel * setting.dtype.itemsize, "calls": calls}
            rows.append(row_of(operation.name, candidate.name, candidate.nbytes, seconds, **figures))
    return rows, unable


if __name__ == "__main__":
    sys.exit(main(parse, run))
