"""Comparison of two results of the same benchmark, before and after a change or of two MPI libraries.

    python benchmarks/compare.py old.json new.json --tolerance 0.1
    python benchmarks/compare.py HEAD~20:all-reduce-np2-mpich.json all-reduce-np2-mpich.json

A result is a file, a name in ``benchmarks/results``, or such a name at a git revision.

Exit code 0: no figure of hpctrain became slower by more than the tolerance; 1: one did; 2: the
files cannot be compared. Results of two MPI libraries are not judged: they show hpctrain against
the faster library.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from communication_candidates import Name
from communication_figures import MEAN_SIZES
from harness.report import RESULTS, table
from harness.run import main

from hpctrain.cli.main import Parser
from hpctrain.errors import EXIT_FAILURE, UsageError
from hpctrain.util.probe import run_program
from hpctrain.util.text import format_bytes

SAME = ("benchmark", "ranks", "nodes", "dtype", "device")
TOLERANCE = 0.1


@dataclass(frozen=True)
class Result:
    """Benchmark result: the keys that must agree, the library, and medians in seconds by (size, candidate)."""

    path: Path
    same: dict[str, Any]
    mpi: str
    medians: dict[tuple[int, str], float]


def run(args: argparse.Namespace) -> int:
    old, new = load(args.old), load(args.new)
    check_same(old, new)
    return compare(old, new, args.tolerance)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="file of a result, or REVISION:NAME")
    parser.add_argument("new", type=Path, help="the same")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="share by which a median may grow")
    args = parser.parse_args(argv)
    if not args.tolerance >= 0:
        raise UsageError(f"tolerance {args.tolerance} is not a share, 0 or more: 0.1 lets a median grow by 10 %")
    return args


def load(path: Path) -> Result:
    """Return a result file's medians; the path is also tried relative to the other results."""
    candidates = (path, RESULTS.parent / path, RESULTS / path)
    found = next((one for one in candidates if one.is_file()), None)
    revision, colon, name = str(path).partition(":")
    if found is None and not colon:
        raise UsageError(f"no result {path}: looked for {', '.join(map(str, candidates))}")
    try:
        content = json.loads(found.read_text(encoding="utf-8") if found else at_revision(revision, name))
        found = found or path
        medians = {(int(row["size"]), str(row["candidate"])): float(row["median"]) for row in content["rows"]}
        return Result(found, {key: content[key] for key in SAME}, str(content["mpi"]), medians)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{found} is no result of a communication benchmark ({type(error).__name__}: {error}): "
            "make -C benchmarks all_reduce writes one"
        ) from error


def at_revision(revision: str, name: str) -> str:
    """Return the text of a result at a git revision. Raises ``UsageError`` if there is none."""
    where = name if "/" in name else f"{RESULTS.parent.name}/{RESULTS.name}/{name}"
    command = ["git", "-C", str(RESULTS.parents[1]), "show", f"{revision}:{where}"]
    answer = run_program(command)
    if revision.startswith("-") or answer.error:
        raise UsageError(f"no result {where} at revision {revision}: {answer.error or 'not a revision'}")
    return answer.text


def check_same(old: Result, new: Result) -> None:
    """Raise ``UsageError`` if the results measured different things."""
    other = [key for key in SAME if old.same[key] != new.same[key]]
    if other:
        what = "; ".join(f"{key} is {old.same[key]} in {old.path} and {new.same[key]} in {new.path}" for key in other)
        raise UsageError(f"these results cannot be compared: {what}")
    if not old.medians.keys() & new.medians.keys():
        raise UsageError(f"these results cannot be compared: {old.path} and {new.path} share no size and candidate")


def compare(old: Result, new: Result, tolerance: float) -> int:
    """Print times and ratios; return 1 if hpctrain became slower by more than the tolerance."""
    print(f"old: {old.path} ({old.mpi})\nnew: {new.path} ({new.mpi})\n")
    judged = old.mpi.split()[0] == new.mpi.split()[0]
    keys = sorted((key for key in old.medians if key in new.medians), key=lambda key: key[0])
    worse = [key for key in keys if judged and key[1].startswith(Name.OURS) and grown(old, new, key) > 1 + tolerance]
    print(table(rows(old, new, keys, worse), left=2))
    if not judged:
        print_better_library(old, new)
        return 0
    if worse:
        print(f"\n{len(worse)} medians of hpctrain grew by more than {tolerance:.0%}", flush=True)
        return EXIT_FAILURE
    print(f"\nno median of hpctrain grew by more than {tolerance:.0%}")
    return 0


def grown(old: Result, new: Result, key: tuple[int, str]) -> float:
    return new.medians[key] / old.medians[key]


def rows(
    old: Result, new: Result, keys: Sequence[tuple[int, str]], worse: Sequence[tuple[int, str]]
) -> list[list[str]]:
    """Return the table: size, candidate, both medians in microseconds, new over old."""
    lines = [["size", "candidate", "new / old", "old us", "new us", ""]]
    for size, name in keys:
        times = [f"{result.medians[size, name] * 1e6:.2f}" for result in (old, new)]
        verdict = "slower" if (size, name) in worse else ""
        lines.append([format_bytes(size), name, f"{grown(old, new, (size, name)):.2f}", *times, verdict])
    return lines


def print_better_library(old: Result, new: Result) -> None:
    """Print how many times faster hpctrain is, under either library, than the faster of the two libraries."""
    print(f"\nhpctrain against the faster of {old.mpi} and {new.mpi}, one call (in brackets: or messages of 16 MiB)")
    lines = [["size", f"with {old.mpi}", f"with {new.mpi}"]]
    ratios: dict[str, list[float]] = {"old": [], "new": []}
    for size in sorted({size for size, name in old.medians if name == Name.OURS and (size, name) in new.medians}):
        one, any_form = fastest((old, new), size, (Name.LIBRARY,)), fastest(
            (old, new), size, (Name.LIBRARY, Name.MESSAGES)
        )
        if one is None or any_form is None:
            continue
        cells = []
        for which, result in (("old", old), ("new", new)):
            own = result.medians[size, Name.OURS]
            if size in MEAN_SIZES:
                ratios[which].append(one / own)
            cells.append(f"{one / own:.2f} ({any_form / own:.2f})")
        lines.append([format_bytes(size), *cells])
    if len(ratios["old"]) == len(MEAN_SIZES):
        means = [statistics.geometric_mean(values) for values in ratios.values()]
        lines.append(["mean from 64 KiB up", *(f"{mean:.2f}" for mean in means)])
    print(table(lines))


def fastest(results: Sequence[Result], size: int, names: Sequence[str]) -> float | None:
    """Return the shortest median of the named candidates in several results."""
    found: list[Mapping[tuple[int, str], float]] = [result.medians for result in results]
    return min((medians[size, name] for medians in found for name in names if (size, name) in medians), default=None)


if __name__ == "__main__":
    sys.exit(main(parse, run))
