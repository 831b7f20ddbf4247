"""Actions ``hpctrain checkpoint verify`` and ``diff``: whether files are intact, and how two files differ."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hpctrain.checkpoint.tools import inspect
from hpctrain.checkpoint.tools.diff import Diff, TensorDifference, ValueDifference, diff
from hpctrain.checkpoint.tools.inspect import Verification, all_of
from hpctrain.cli.checkpoint.text import chosen, one_line, print_json, progress
from hpctrain.cli.options import action
from hpctrain.errors import EXIT_FAILURE, CheckpointError, UsageError
from hpctrain.util.child import safe_path
from hpctrain.util.text import columns, printable, printable_lines

_VERIFY_EPILOG = """\
examples:
  hpctrain checkpoint verify runs/a      all checkpoints of the run
  hpctrain checkpoint verify runs/a/checkpoints/*.h5
  hpctrain checkpoint verify runs/*/checkpoints/*.h5 --jobs 8

exit code: 0 if all files are sound, 1 if one is damaged, 2 if one does not exist
"""
_DIFF_EPILOG = """\
examples:
  hpctrain checkpoint diff runs/a/checkpoints/step_00001200.h5 runs/b/checkpoints/step_00001200.h5
  hpctrain checkpoint diff runs/a runs/b      the newest valid checkpoint of each run
  hpctrain checkpoint diff before.h5 after.h5 --json

Compares tensors (names, shapes, dtypes, every bit), settings, values of the training loop, and versions. The origin of
a file (user, host, date) is shown, but does not count as a difference.

exit code: 0 if equal, 1 if different, 2 if a file is damaged or does not exist
"""


def add_actions(actions: Any) -> None:
    """Add both actions to the command line."""
    verifying = action(actions, "verify", "check that every stored bit is as it was written", _VERIFY_EPILOG, _verify)
    verifying.add_argument("files", metavar="FILE", nargs="+", help="checkpoints, or folders of runs")
    verifying.add_argument("--jobs", type=int, default=1, metavar="N", help="files read at the same time (default: 1)")
    comparing = action(actions, "diff", "show the differences between two checkpoints", _DIFF_EPILOG, _diff)
    comparing.add_argument("first", metavar="A", help="a checkpoint, or the folder of a run")
    comparing.add_argument("second", metavar="B", help="another one")


def _verify(args: argparse.Namespace) -> int:
    for file in args.files:
        if not Path(file).exists():
            raise UsageError(f"no such file: {file}; give checkpoints, such as RUN/checkpoints/*.h5")
    if args.jobs < 1:
        raise UsageError(f"--jobs is {args.jobs}: must be at least 1")
    verdicts: list[Verification] = []
    files = [str(path) for file in args.files for path in all_of(file)]
    for verdict in _verdicts(files, min(args.jobs, len(files))):
        verdicts.append(verdict)
        if not args.json:
            tqdm.write(_verdict_line(verdict), file=sys.stdout)
    if args.json:
        print_json([dataclasses.asdict(verdict) for verdict in verdicts])
    return 0 if all(verdict.ok for verdict in verdicts) else EXIT_FAILURE


def _verdicts(files: Sequence[str], jobs: int) -> Iterator[Verification]:
    """Yield a verdict for each file, in order."""
    if jobs == 1:
        with progress(files) as on_bytes:
            yield from (inspect.verify(file, on_bytes) for file in files)
        return
    # Processes instead of threads: HDF5 admits one thread at a time. Spawned, so that they inherit no state.
    with safe_path(), ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(inspect.verify, files)
        except BrokenProcessPool as error:
            raise CheckpointError("a process that verifies files was killed: use fewer --jobs") from error


def _verdict_line(verdict: Verification) -> str:
    return printable(f"ok       {verdict.file}" if verdict.ok else f"damaged  {verdict.error or verdict.file}")


def _diff(args: argparse.Namespace) -> int:
    first, second = chosen(args.first), chosen(args.second)
    with progress([first, second]) as on_bytes:
        found = diff(first, second, on_bytes)
    if args.json:
        print_json({"same": found.same, **dataclasses.asdict(found)})
    else:
        print(printable_lines("\n".join(printable(line) for line in _lines(found))))
    return 0 if found.same else EXIT_FAILURE


def _lines(found: Diff) -> list[str]:
    differing = len(found.tensors)
    lines = [f"A  {found.first}", f"B  {found.second}", "", f"tensors  {found.equal} equal, {differing} different"]
    lines += columns([["", *_tensor_row(each)] for each in found.tensors])
    for title in ("settings", "values", "versions", "provenance"):
        rows: list[ValueDifference] = getattr(found, title)
        if rows:
            suffix = " (not compared)" if title == "provenance" else ""
            lines += ["", title + suffix, *columns([["", *_value_row(each)] for each in rows])]
    return [*lines, "", "no difference" if found.same else "different"]


def _tensor_row(each: TensorDifference) -> list[str]:
    if each.problem != "values":
        return [each.path, f"A {each.first or 'absent'}", f"B {each.second or 'absent'}"]
    row = [each.path, f"{each.count:,} of {each.elements:,} differ"]
    if each.maximum is not None:
        row += [f"max {each.maximum:.4g}", f"relative {each.relative:.4g}"]
    return row + ([f"{each.nonfinite:,} not finite"] if each.nonfinite else [])


def _value_row(each: ValueDifference) -> list[str]:
    name = each.name if each.place in ("config", "/provenance") else f"{each.place.rstrip('/')}/{each.name}"
    sides = [one_line("absent" if side is None else side, 50) for side in (each.first, each.second)]
    return [name, f"A {sides[0]}", f"B {sides[1]}"]
