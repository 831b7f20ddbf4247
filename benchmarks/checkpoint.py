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

import checkpoint_background as background
from checkpoint_candidates import Name, readers, save, writers
from checkpoint_figures import Row, by_name, draw, earlier_targets, measure, ratio_tables, row_table, targets
from checkpoint_state import LEAST, Setting, Work, delete, filesystem_of
from harness.ranks import process_group, refuse, start
from harness.report import left_out_lines, mpi_name, target_table
from harness.run import finish, main, make_parser, parse_names, parse_sizes
from harness.turns import announce, stop

from hpctrain.errors import UsageError
from hpctrain.train.job import Job
from hpctrain.util.text import format_bytes

PARTS = ("write", "read", "background")
SIZE, ROUNDS = "512MiB", 7


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("checkpoint", __doc__, rounds=ROUNDS, quick=False)
    parser.add_argument("--size", default=SIZE, help="bytes of parameters and moments (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the files go, and stay; default: a temporary one")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: %(default)s)")
    parser.add_argument("--without", default="", help="candidates to leave out, as in torch.save,torch DCP")
    parser.add_argument("--only-write", action="store_true", help="write a file for others to load, measure nothing")
    args = parser.parse_args(argv)
    sizes = parse_sizes(args.size)
    if len(sizes) != 1 or sizes[0] < LEAST:
        raise UsageError(f"--size {args.size}: give one size, at least {format_bytes(LEAST)}")
    args.size = sizes[0]
    if args.only_write and not args.folder:
        raise UsageError("--only-write needs --folder: a temporary folder is deleted at the end")
    args.parts, args.without = parse_names("part", args.parts, PARTS), parse_names(
        "candidate", args.without, list(Name)
    )
    return args


def run(args: argparse.Namespace) -> None:
    job = start("checkpoint", least=1)
    with folder_of(job, args.folder, args.out) as folder:
        work = Work.of(Setting(job.comm, folder), args.size)
        if args.only_write:
            save(work, work.from_ranks(job.size))
            return
        with process_group(job.comm):
            rows, left_out = measure_parts(work, args)
            loops: list[Row] = []
            if "background" in args.parts and not stop.number:  # it changes the values, so it comes last
                announce(f"training with saves of {format_bytes(work.nbytes)}", job.comm)
                savers = [one for one in background.savers(work) if one.name not in args.without]
                loops = background.measure(work, job, savers, args.rounds)
        if job.rank == 0:
            report(work, args, job, rows, loops, left_out)


@contextmanager
def folder_of(job: Job, asked: Path | None, results: Path) -> Iterator[Path]:
    """Provide the folder that all ranks write into: the requested one, or a temporary one next to the results."""
    made, problem = None, ""
    try:
        if job.rank == 0:
            (asked or results).mkdir(parents=True, exist_ok=True)
        if job.rank == 0 and asked is None:
            made = Path(tempfile.mkdtemp(prefix="checkpoint.tmp-", dir=results))
    except OSError as error:
        problem = f"{asked or results}: files cannot be written there: {error.strerror}"
    where, problem = job.comm.broadcast_object((str(made or asked), problem))
    if problem:
        refuse(problem)
    try:
        yield Path(where)
        job.comm.barrier()
    finally:
        if made:
            delete(made)


def measure_parts(work: Work, args: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """Measure saving, then loading of the saved files."""
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for kind, what, candidates in (("write", "saving", writers), ("read", "loading", readers)):
        if kind in args.parts and not stop.number:
            announce(f"{what} {format_bytes(work.nbytes)}", work.setting.comm)
            chosen = [each for each in candidates(work) if each.name not in args.without]
            found, problems = measure(work.setting, kind, chosen, args.rounds)
            rows, left_out = rows + found, left_out | problems
    return rows, left_out


def report(
    work: Work, args: argparse.Namespace, job: Job, rows: list[Row], loops: list[Row], left_out: dict[str, str]
) -> None:
    figures, filesystem = by_name(rows), filesystem_of(work.setting.folder)
    found = [*targets(figures), *background.background_targets(loops), *earlier_targets(args.out)]
    lines = [f"\ncheckpoint of {format_bytes(work.nbytes)}, {job.size} ranks, {filesystem}, {mpi_name()}\n"]
    if filesystem in ("tmpfs", "ramfs"):
        lines.append(f"the folder is in memory ({filesystem}), so these figures say nothing about a disk; set FOLDER\n")
    lines += [target_table(found), *ratio_tables(figures), *row_table(figures), background.background_table(loops)]
    content = {
        "nodes": job.comm.nodes,
        "dtype": "float32",
        "device": "cpu",
        "size": work.nbytes,
        "filesystem": filesystem,
        "rows": rows,
        "background": loops,
        "left_out": left_out,
    }
    finish(args, "checkpoint", content, [*lines, *left_out_lines(left_out)], job=job, found=found, draw=draw)


if __name__ == "__main__":
    sys.exit(main(parse, run))
