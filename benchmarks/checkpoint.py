"""Time of saving and loading a checkpoint: hpctrain, plain writes and reads, torch.save, torch.distributed.checkpoint.

    mpiexec -n 2 python benchmarks/checkpoint.py --size 512MiB

A GPT with the moments of AdamW, float32, replicated on all ranks; the number of bytes is the same
for all candidates. The candidates are interleaved. A turn begins with the old file deleted and the
disk idle. The clock runs from a barrier until each rank is done and all data is flushed to the
disk. Then the values in the file are compared with those in memory, untimed. Reads find their file
in the page cache. `make -C benchmarks checkpoint` first also writes files with other numbers of
ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from comm.peers import process_group
from comm.place import Place as Ranks
from comm.sizes import parse_names, parse_sizes, size_text
from harness import RESULTS, guarded, mpi_name, mpi_slug, provenance, write
from saving import background, kept, ours, peers, plot, report, yardsticks
from saving.candidates import Candidate
from saving.disk import delete, filesystem_of
from saving.figures import Row, by_name, to_json
from saving.measure import measure
from saving.names import ASYNC, BACKGROUND, FOREGROUND, READERS, WRITERS
from saving.place import Place
from saving.state import LEAST
from saving.targets import Target, background_targets, targets
from saving.work import Work

import hpctrain
from hpctrain.cli.main import Parser
from hpctrain.errors import UsageError

PARTS = ("write", "read", "background")
SIZE, ROUNDS = "512MiB", 7
WAYS = (FOREGROUND, BACKGROUND, ASYNC)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; rank 0 prints and writes. Return the exit code."""
    return guarded(lambda: run(parse(argv)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="checkpoint.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--size", default=SIZE, help="bytes of parameters and moments (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed turns of each candidate")
    parser.add_argument("--folder", type=Path, help="where the files go, and stay; default: a temporary one")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: %(default)s)")
    parser.add_argument("--without", default="", help="candidates to leave out, as in torch.save,torch DCP")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--only-write", action="store_true", help="write a file for others to load, measure nothing")
    args = parser.parse_args(argv)
    sizes, args.parts, args.without = parse_sizes(args.size), parse_names(args.parts), parse_names(args.without)
    if len(sizes) != 1 or sizes[0] < LEAST:
        raise UsageError(f"--size {args.size}: give one size, at least {size_text(LEAST)}", everywhere=True)
    args.size = sizes[0]
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    if args.rounds < 1:
        raise UsageError(f"{args.rounds} rounds: at least 1 is needed", everywhere=True)
    if args.only_write and not args.folder:
        raise UsageError("--only-write needs --folder: a temporary folder is deleted at the end", everywhere=True)
    candidates = (*WRITERS, *READERS, *WAYS)
    for option, names, known in (("part", args.parts, PARTS), ("candidate", args.without, candidates)):
        for name in names:
            if name not in known:
                raise UsageError(f"no {option} is called {name!r}: known are {', '.join(known)}", everywhere=True)


def run(args: argparse.Namespace) -> None:
    """Join the job, measure the parts, report."""
    job = hpctrain.init(device="cpu")
    with folder_of(job, args.folder) as folder:
        work = Work.of(Place(job.comm, folder), args.size)
        if args.only_write:
            ours.save(work, work.from_ranks(job.size))
            return
        with process_group(Ranks(job.comm, job.device, torch.float32)):
            rows, unable = measure_parts(work, args)
            loops = measure_loops(work, job, args) if "background" in args.parts else []
        if job.rank == 0:
            finish(work, args, rows, loops, unable)


@contextmanager
def folder_of(job: Any, asked: Path | None) -> Iterator[Path]:
    """Provide the folder that all ranks write into: the requested one, or a temporary one next to the results."""
    made = None
    if job.rank == 0 and asked is None:
        made = Path(tempfile.mkdtemp(prefix="checkpoint.tmp-", dir=RESULTS.parent))
    elif job.rank == 0 and asked is not None:
        asked.mkdir(parents=True, exist_ok=True)
    try:
        yield Path(job.comm.broadcast_object(str(made or asked)))
        job.comm.barrier()
    finally:
        if made:
            delete(made)


def measure_parts(work: Work, args: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """Measure saving, then loading of the saved files."""
    rows: list[Row] = []
    unable: dict[str, str] = {}
    if "write" in args.parts:
        announce(work, "saving")
        found, problems = measure(work.place, "write", chosen(writers(work), args.without), args.rounds)
        rows, unable = rows + found, unable | problems
    if "read" in args.parts:
        announce(work, "loading")
        found, problems = measure(work.place, "read", chosen(readers(work), args.without), args.rounds)
        rows, unable = rows + found, unable | problems
    return rows, unable


def measure_loops(work: Work, job: Any, args: argparse.Namespace) -> list[background.BackgroundRow]:
    """Measure saving during training; it changes the values, so it comes last."""
    announce(work, "training with saves of")
    ways = [each for each in (*ours.ways(work), *peers.ways(work)) if each.name not in args.without]
    return background.measure(work, job, ways, args.rounds)


def writers(work: Work) -> Iterator[Candidate]:
    """Yield all candidates that save."""
    yield from yardsticks.writers(work)
    yield from ours.writers(work)
    yield from peers.writers(work)


def readers(work: Work) -> Iterator[Candidate]:
    """Yield all candidates that load; a missing file is written first."""
    own = work.from_ranks(work.place.size)
    if not own.exists():
        ours.save(work, own)
    yield from yardsticks.readers(work, own)
    yield from ours.readers(work, written_by(work.place.folder))
    yield from peers.readers(work)


def written_by(folder: Path) -> list[int]:
    """Return the numbers of ranks that wrote the files in the folder."""
    return sorted(int(path.stem.removeprefix("from-")) for path in folder.glob("from-*.h5"))


def chosen(candidates: Iterator[Candidate], without: Sequence[str]) -> list[Candidate]:
    """Return the candidates without the excluded ones."""
    return [each for each in candidates if each.name not in without]


def announce(work: Work, what: str) -> None:
    """Print a progress line."""
    if work.place.rank == 0:
        print(f"{what} {size_text(work.nbytes)} ...", file=sys.stderr, flush=True)


def finish(
    work: Work,
    args: argparse.Namespace,
    rows: list[Row],
    loops: list[background.BackgroundRow],
    unable: dict[str, str],
) -> None:
    """Print, write and plot a result."""
    figures, filesystem = by_name(rows), filesystem_of(work.place.folder)
    found: list[Target] = [*targets(figures), *background_targets(loops), *kept.targets(args.results)]
    print(f"\ncheckpoint of {size_text(work.nbytes)}, {work.place.size} ranks, {filesystem}, {mpi_name()}\n")
    if filesystem in ("tmpfs", "ramfs"):
        print(f"the folder is in memory ({filesystem}), so these figures say nothing about a disk; set FOLDER\n")
    report.print_targets(found)
    report.print_ratios(figures)
    report.print_rows(figures)
    report.print_background(loops)
    report.print_unable(unable)
    content = {
        "benchmark": "checkpoint",
        "ranks": work.place.size,
        "nodes": work.place.comm.nodes,
        "dtype": "float32",
        "device": "cpu",
        "mpi": mpi_name(),
        "size": work.nbytes,
        "filesystem": filesystem,
        "targets": report.targets_json(found),
        "rows": to_json(rows),
        "background": background.to_json(loops),
        "left_out": unable,
        "provenance": provenance(work.place.size, mpi_name()),
    }
    name = f"checkpoint-np{work.place.size}-{mpi_slug()}"
    paths = [write(name, content, args.results), *plot.draw(content, args.results / name)]
    print("written to " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    sys.exit(main())
