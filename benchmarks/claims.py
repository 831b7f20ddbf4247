"""Ranges of the ratios that are claimed, over all recorded runs, by model of processor.

    python benchmarks/claims.py
    make -C benchmarks claims

A ratio is that of two medians of one run. The table shows the median, the least and the greatest
ratio of all runs on processors of one model. If the repeats of one side spread by more than the
sides differ, a single run cannot show the difference, and the row says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.history import Figure, Run, runs_of
from harness.report import RESULTS, table
from harness.run import main

from hpctrain.cli.main import Parser
from hpctrain.errors import UsageError
from hpctrain.util.atomic import write_text
from hpctrain.util.reading import read_text
from hpctrain.util.text import counted, format_bytes

ENOUGH = 5  # runs, from which on a range is one
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- ranges: make -C benchmarks claims -->", "<!-- end of ranges -->"
KIB, MIB = 2**10, 2**20
DIRECT = "2026-11-29T02:10"  # from then on, checkpoints are written past the page cache
WAITS = "2026-11-29T14:49"  # from then on, ranks that wait for a small call of torch.distributed do not sleep

Sides = tuple[list[Figure], list[Figure]]  # of hpctrain, and of what it is compared with


@dataclass(frozen=True)
class Claim:
    """Ratio of two figures of a benchmark: how many times as fast ``ours`` is as ``theirs``.

    Both are candidates of a group, of one size; the times of several candidates are added.
    """

    what: str
    other: str
    file: str
    command: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    size: int | str = ""
    group: str = "seconds"
    others_group: str = ""
    since: str = ""  # date of a change, before which runs measured something else

    def sides(self, run: Run) -> Sides | None:
        """Return the figures of both sides in a run; None if the run has not measured one of them, or is too old."""
        if str(run.provenance.get("date", "")) < self.since:
            return None
        wanted = (self.ours, self.group), (self.theirs, self.others_group or self.group)
        found = [[run.figures.get((group, name, str(self.size))) for name in names] for names, group in wanted]
        ours, theirs = ([figure for figure in side if figure is not None] for side in found)
        complete = len(ours) == len(self.ours) and len(theirs) == len(self.theirs)
        return (ours, theirs) if complete else None


@dataclass(frozen=True)
class Range:
    """Ratio of a claim over the runs on one model of processor, and the medians of the spreads of both sides."""

    claim: Claim
    processor: str
    ratios: tuple[float, ...]
    days: int
    spread: tuple[float, float]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def remark(self) -> str:
        """Return what a reader must know: too few runs, a side that spreads further than the sides differ, slower."""
        notes = []
        if len(self.ratios) < ENOUGH:
            notes.append(f"fewer than {ENOUGH} runs")
        if max(self.spread) > abs(self.median - 1):
            notes.append("spread exceeds the difference")
        if self.median < 1:
            notes.append("slower")
        return ", ".join(notes)


def _collectives() -> Iterator[Claim]:
    for operation, sizes in (
        ("all_reduce", (4, 256, 4 * KIB, 64 * KIB, MIB, 4 * MIB, 25 * MIB, 64 * MIB)),
        ("reduce_scatter", (MIB, 25 * MIB, 64 * MIB)),
        ("all_gather", (MIB, 25 * MIB, 64 * MIB)),
    ):
        file, command = f"{operation.replace('_', '-')}-np2-mpich", f"{operation} NP=2"
        for size in sizes:
            for name, tensors in (("hpctrain", "tensors of `comm.empty`"), ("hpctrain outside", "ordinary tensors")):
                what = f"{operation} of {format_bytes(size)}, {tensors}"
                for theirs, other in (("mpi", "MPICH, one call"), ("mpi 16 MiB", "MPICH, messages of 16 MiB")):
                    if theirs == "mpi" or size > 16 * MIB:
                        yield Claim(what, other, file, command, (name,), (theirs,), size, "rows")
                if operation == "all_reduce" and name == "hpctrain":
                    yield Claim(what, "gloo", file, command, (name,), ("gloo",), size, "rows")


def _torch_backend() -> Iterator[Claim]:
    file, command = "torch-backend-np2-mpich", "torch-backend NP=2"
    for size in (4, 64 * KIB, MIB, 25 * MIB, 64 * MIB):
        what = f"all_reduce of {format_bytes(size)} by torch.distributed, back end hpctrain"
        group = "collectives/all_reduce"
        yield Claim(what, "back end gloo", file, command, ("hpctrain",), ("gloo",), size, group, since=WAITS)
    for batch in (1, 4):
        for step, kind in (("DDP", "torch DDP"), ("FSDP2", "torch FSDP2")):
            what = f"step of {kind} on the back end hpctrain, {counted(batch, 'sequence')} per rank"
            ours, theirs, group = f"{step} on hpctrain", f"{step} on gloo", f"steps/{batch}/seconds"
            yield Claim(what, "on gloo", file, command, (ours,), (theirs,), group=group)


def _two_nodes() -> Iterator[Claim]:
    for theirs, other in (("mpi", "MPICH, one call"), ("gloo", "gloo")):
        what, file = "all_reduce of 16 MiB, 2 x 2 ranks on two nodes, 1 Gbit/s", "multinode-nodes2-np4-mpich"
        yield Claim(what, other, file, "multinode", ("hpctrain",), (theirs,), 16 * MIB, "rows")


def _reproducible() -> Iterator[Claim]:
    for count in (1, 4):
        for strategy in ("DDP", "ZeRO-1", "FSDP"):
            what = f"{strategy} step with parallel.reproducible, {counted(count, 'microbatch')} per rank"
            ours, theirs = f"{strategy}, reproducible, {count} per rank", f"{strategy}, {count} per rank"
            yield Claim(what, "without it", "reproducible-np2-mpich", "reproducible NP=2", (ours,), (theirs,))


def _checkpoints() -> Iterator[Claim]:
    file, command, size = "checkpoint-np2-mpich", "checkpoint SIZE=512MiB", 536862720
    for theirs in ("torch.save", "torch DCP", "raw pwrite", "raw pwrite, one file"):
        what, ours = "checkpoint of 512 MiB, written", ("hpctrain",)
        yield Claim(what, theirs, file, command, ours, (theirs,), size, "rows", since=DIRECT)
    for theirs in ("torch.load", "torch DCP load"):
        yield Claim("the same, loaded", theirs, file, command, ("hpctrain load",), (theirs,), size, "rows")
    for what, key, theirs in (
        ("pause of the training, written in the background", "stall", "torch DCP async"),
        ("until it is written in the background", "written", "torch DCP async"),
    ):
        groups = "background/hpctrain background/spread", f"background/{theirs}/spread"
        yield Claim(what, theirs, file, command, (key,), (key,), "", *groups, since=DIRECT)


CLAIMS = (
    *_collectives(),
    Claim("DDP step", "torch DDP + gloo", "ddp-step-np2", "ddp-step NP=2", ("hpctrain DDP",), ("torch DDP + gloo",)),
    Claim(
        "FSDP step",
        "torch FSDP2 + gloo",
        "fsdp-step-np2-mpich",
        "fsdp-step NP=2",
        ("hpctrain FSDP",),
        ("torch FSDP2 + gloo",),
    ),
    Claim(
        "tensor-parallel step",
        "torch DTensor + gloo",
        "tensor-np2-mpich",
        "tensor NP=2",
        ("hpctrain tensor",),
        ("torch DTensor + gloo",),
    ),
    Claim(
        "pipeline step, 1F1B",
        "torch.distributed.pipelining + gloo",
        "pipeline-np2-mpich",
        "pipeline NP=2",
        ("hpctrain 1f1b",),
        ("torch 1F1B + gloo",),
    ),
    Claim(
        "start to the end of the first step",
        "`import torch` and MPI's start alone",
        "startup-np2",
        "startup NP=2",
        ("first step ended",),
        ("import torch", "MPI start"),
    ),
    *_checkpoints(),
    *_torch_backend(),
    *_two_nodes(),
    *_reproducible(),
)


def ranges(folder: Path, claims: Sequence[Claim] = CLAIMS) -> list[Range]:
    """Return the range of each claim on each model of processor, those with most runs first."""
    runs = {name: list(runs_of(folder, name)) for name in {claim.file for claim in claims}}
    found = []
    for claim in claims:
        measured: dict[str, list[tuple[str, Sides]]] = defaultdict(list)
        for run in runs[claim.file]:
            if (sides := claim.sides(run)) is not None:
                measured[run.processor].append((run.day, sides))
        for processor, each in measured.items():
            ratios = tuple(_sum(theirs) / _sum(ours) for _, (ours, theirs) in each)
            ours, theirs = (
                statistics.median(max(one.spread for one in sides[which]) for _, sides in each) for which in (0, 1)
            )
            found.append(Range(claim, processor, ratios, len({day for day, _ in each}), (ours, theirs)))
    return found


def _sum(figures: Sequence[Figure]) -> float:
    return sum(one.median for one in figures)


def rows_of(found: Sequence[Range]) -> list[list[str]]:
    """Return the rows of the table of one processor, with its head."""
    rows = [["hpctrain", "compared with", "times as fast", "runs, days", "spread of both", ""]]
    for one in found:
        least, greatest = min(one.ratios), max(one.ratios)
        text = f"{one.median:.2f} ({least:.2f} to {greatest:.2f})"
        spread = ", ".join(f"{part:.0%}" for part in one.spread)
        rows.append([one.claim.what, one.claim.other, text, f"{len(one.ratios)}, {one.days}", spread, one.remark])
    return rows


def markdown(found: Sequence[Range]) -> str:
    """Return the tables of all processors for a page."""
    parts = []
    for processor, own in by_processor(found).items():
        head, *rows = rows_of(own)
        lines = [head, ["---"] * len(head), *rows]
        parts.append(f"{processor}:\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join(parts)


def by_processor(found: Sequence[Range]) -> dict[str, list[Range]]:
    grouped = defaultdict(list)
    for one in found:
        grouped[one.processor].append(one)
    return dict(sorted(grouped.items(), key=lambda pair: -sum(len(one.ratios) for one in pair[1])))


def with_tables(page: str, tables: str) -> str:
    """Return a page with other tables between its marks."""
    if END not in page.partition(BEGIN)[2]:
        raise UsageError(f"the page has no place for the tables: it needs the lines {BEGIN} and {END}")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}"


def as_json(found: Sequence[Range]) -> list[dict[str, Any]]:
    return [
        {
            "what": one.claim.what,
            "compared_with": one.claim.other,
            "command": f"make -C benchmarks {one.claim.command}",
            "processor": one.processor,
            "ratios": [round(ratio, 4) for ratio in one.ratios],
            "median": one.median,
            "days": one.days,
            "spread": one.spread,
            "remark": one.remark,
        }
        for one in found
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="claims.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--page", type=Path, help=f"page to write the tables into, such as docs/{PAGE.name}")
    parser.add_argument("--json", action="store_true", help="print the ranges as JSON")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    found = ranges(args.results)
    if args.page is not None:
        write_text(args.page, with_tables(read_text(args.page), markdown(found)))
    if args.json:
        print(json.dumps(as_json(found), indent=2))
        return
    for processor, own in by_processor(found).items():
        print(f"{processor}\n\n{table(rows_of(own), left=2)}\n")
    if not found:
        print(f"{args.results}: no runs are recorded; run a benchmark, as in `make -C benchmarks ddp-step`")


if __name__ == "__main__":
    sys.exit(main(parse, run))
