"""Time of one operation over sizes: hpctrain, the MPI library and torch.distributed, in one run on the same ranks.

    mpiexec -n 2 python benchmarks/communication.py all_reduce --sizes 4,64K,1M,4M,25M,64M

The candidates are interleaved. A repeat begins with a barrier and consists of several calls,
depending on the size; its figure is the mean of them, on the slowest rank. All results are compared
with a reference before and after, untimed. During timing, tensors are zero: their sum stays zero
after any number of calls, so that no value overflows. Tensors also need no refill, which would
change the contents of the caches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from comm import ours, overlap, peers, plot, report
from comm.figures import Row, by_size_and_name, to_json
from comm.measure import measure_size
from comm.names import OURS, OUTSIDE, PEERS
from comm.operations import OPERATIONS
from comm.place import Place
from comm.sizes import parse_names, parse_sizes, size_text
from comm.targets import targets
from harness import RESULTS, guarded, mpi_name, mpi_slug, provenance, write

import hpctrain
from hpctrain.cli.main import Parser
from hpctrain.errors import UsageError

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
SIZES = "4,64K,1M,4M,25M,64M"
OVERLAP_SIZES = "64K,1M,4M,25M"  # shorter messages cannot overlap with one unit of compute
ROUNDS = 40
KNOWN = (OURS, f"{OURS} and an algorithm", OUTSIDE, *PEERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints and writes. Return the exit code."""
    return guarded(lambda: run(parse(argv)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="communication.py", description=__doc__, formatter_class=raw)
    parser.add_argument("operation", choices=[*OPERATIONS, "overlap"])
    usual = f"{SIZES} (overlap: {OVERLAP_SIZES})"
    parser.add_argument("--sizes", default="", help=f"bytes of the whole tensor, default: {usual}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--algorithms", default="", help="of hpctrain, as in auto,window,ring; default: auto")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed repeats of each candidate")
    parser.add_argument("--without", default="", help="candidates to leave out, as in gloo,hpctrain outside")
    parser.add_argument("--oversubscribe", action="store_true", help="let ranks share a GPU")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    args.sizes = parse_sizes(args.sizes or (OVERLAP_SIZES if args.operation == "overlap" else SIZES))
    if args.rounds < 1:
        raise UsageError(f"{args.rounds} rounds: at least 1 is needed", everywhere=True)
    args.without, args.algorithms = parse_names(args.without), parse_names(args.algorithms)
    for name in args.without:
        if name not in PEERS and not name.startswith(OURS):
            raise UsageError(f"no candidate is called {name!r}: known are {', '.join(KNOWN)}", everywhere=True)
    return args


def run(args: argparse.Namespace) -> None:
    """Join the job, measure every size, report."""
    job = hpctrain.init(device=args.device, oversubscribe=args.oversubscribe)
    check_ranks(args.operation, job.size)
    dtype = getattr(torch, args.dtype)
    place = Place(job.comm, job.device, dtype, args.algorithms or ["auto"], bool(args.algorithms))
    with peers.process_group(place):
        if args.operation == "overlap":
            run_overlap(place, args)
        else:
            run_operation(place, args)


def check_ranks(operation: str, ranks: int) -> None:
    """Raise ``UsageError`` for numbers of ranks for which the operation is meaningless."""
    if operation == "pingpong" and ranks != 2:
        raise UsageError(f"pingpong is between 2 ranks, not {ranks}: set NP=2", everywhere=True)
    if ranks < 2:
        raise UsageError(f"{operation} needs 2 ranks or more, not {ranks}: set NP", everywhere=True)


def run_operation(place: Place, args: argparse.Namespace) -> None:
    """Measure an operation at every size."""
    operation = OPERATIONS[args.operation]
    rows: list[Row] = []
    unable: dict[str, str] = {}
    for nbytes in reversed(args.sizes):  # the largest first: smaller sizes use the beginning of its memory
        announce(place, args.operation, nbytes)
        found, problems = measure_size(place, operation, nbytes, args.rounds, args.without)
        rows = found + rows
        unable |= problems
    if place.rank == 0:
        finish(place, args, rows, unable)


def run_overlap(place: Place, args: argparse.Namespace) -> None:
    """Measure at every size how much of a reduction overlaps."""
    rows: list[overlap.OverlapRow] = []
    unable: dict[str, str] = {}
    for nbytes in reversed(args.sizes):
        announce(place, args.operation, nbytes)
        found, problems = overlap.measure(place, nbytes, args.rounds, args.without)
        rows = found + rows
        unable |= problems
    if place.rank == 0:
        print(heading(place, args))
        report.print_overlap(rows)
        print("\n" + report.explain(mpi_name()))
        report.print_unable(unable)
        save(place, args, {"rows": overlap.rows_json(rows), "left_out": unable})


def heading(place: Place, args: argparse.Namespace) -> str:
    """Return a headline of the measurement and its setting."""
    where = f"{place.size} ranks on {place.comm.nodes} node{'s' if place.comm.nodes > 1 else ''}"
    return f"\n{args.operation}, {where}, {args.dtype}, {args.device}, {mpi_name()}\n"


def announce(place: Place, operation: str, nbytes: int) -> None:
    """Print a progress line."""
    if place.rank == 0:
        print(f"{operation} {size_text(nbytes)} ...", file=sys.stderr, flush=True)


def finish(place: Place, args: argparse.Namespace, rows: list[Row], unable: dict[str, str]) -> None:
    """Print, write and plot a result."""
    figures = by_size_and_name(rows)
    found = list(targets(args.operation, place.size, figures, ours.twin_name(place.dtype)))
    print(heading(place, args))
    report.print_ratios(figures)
    report.print_targets(found)
    report.print_rows(figures)
    print("\n" + report.explain(mpi_name()))
    report.print_unable(unable)
    content: dict[str, Any] = {
        "ratios": report.ratios_json(figures),
        "targets": report.targets_json(found),
        "rows": to_json(rows),
        "left_out": unable,
    }
    save(place, args, content)


def save(place: Place, args: argparse.Namespace, content: dict[str, Any]) -> None:
    """Write and plot a result."""
    head = {
        "benchmark": args.operation,
        "ranks": place.size,
        "nodes": place.comm.nodes,
        "dtype": args.dtype,
        "device": args.device,
        "mpi": mpi_name(),
    }
    extra = [word for word, usual in ((args.device, "cpu"), (args.dtype, "float32")) if word != usual]
    nodes = [f"nodes{place.comm.nodes}"] if place.comm.nodes > 1 else []
    name = "-".join([args.operation.replace("_", "-"), f"np{place.size}", *nodes, mpi_slug(), *extra])
    whole = {**head, **content, "provenance": provenance(place.size, mpi_name())}
    paths = [write(name, whole, args.results), *plot.draw(whole, args.results / name)]
    print("written to " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    sys.exit(main())
