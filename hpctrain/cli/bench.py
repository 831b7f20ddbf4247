"""Verb ``hpctrain bench``: measures which collectives are fastest here, and runs and compares the benchmarks.

The benchmarks are programs in ``benchmarks/``, which the package contains; they run on the ranks of this job.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hpctrain.cli.main import Parser, add_action, add_verb, quantity
from hpctrain.cluster.launcher import detect, rank_from_environment
from hpctrain.errors import UsageError
from hpctrain.util.text import printable_lines

if TYPE_CHECKING:
    from hpctrain.train.calibrate import CalibrationReport

_EPILOG = """\
examples:
  mpiexec -n 4 hpctrain bench calibrate    about a minute: which algorithm is fastest for which size
  hpctrain bench show                      the calibration stored for this machine
  srun hpctrain bench all_reduce           times of a collective over sizes, next to MPI's own and gloo
  srun hpctrain bench checkpoint --folder /scratch/me/test --size 4GiB
  hpctrain bench report bench-results      what was measured; of two folders, what differs

Benchmarks run on the ranks that srun or mpiexec has started, and write to the folder bench-results (--out). Durations
in brackets were measured, of two ranks on two cores.
"""
_REPORT_EPILOG = """\
examples:
  hpctrain bench report bench-results               targets and figures of a folder
  hpctrain bench report node1 node2 node3           what differs between nodes, of which each has measured by itself
  hpctrain bench report monday friday --all --csv   all figures of both, for a spreadsheet

Two figures differ if their medians do by more than --tolerance, and their spreads do not meet.
"""
# Benchmark, its program with the words that it takes, and what it measures.
SUITE = {
    "pingpong": ("communication.py", ("pingpong",), "messages between two ranks: hpctrain, MPI, gloo [0.5 min]"),
    "all_reduce": ("communication.py", ("all_reduce",), "all_reduce over sizes: hpctrain, MPI, gloo [0.5 min]"),
    "reduce_scatter": ("communication.py", ("reduce_scatter",), "the same of reduce_scatter [0.5 min]"),
    "all_gather": ("communication.py", ("all_gather",), "the same of all_gather [0.5 min]"),
    "broadcast": ("communication.py", ("broadcast",), "the same of broadcast"),
    "overlap": ("communication.py", ("overlap",), "how much of an all_reduce overlaps with computation"),
    "multinode": ("multinode.py", (), "all_reduce between nodes, and the link by plain TCP"),
    "ddp": ("ddp_step.py", (), "a training step: DDP of hpctrain and of torch on gloo [1 min]"),
    "fsdp": ("fsdp_step.py", (), "a training step: DDP, ZeRO, FSDP of hpctrain and of torch"),
    "tensor": ("tensor.py", (), "a tensor-parallel step, and torch's DTensor on gloo [1 min]"),
    "pipeline": ("pipeline.py", (), "pipeline schedules, and torch's on gloo [4 min]"),
    "compile": ("compile_step.py", (), "a step of a compiled GPT under each strategy"),
    "reproducible": ("reproducible.py", (), "a step with and without parallel.reproducible"),
    "torch-backend": ("torch_backend.py", (), "torch.distributed on hpctrain and on gloo"),
    "checkpoint": ("checkpoint.py", (), "saving and loading, next to plain writes and torch's [6 min]"),
    "memory-errors": ("memory_errors.py", (), "comparison of replicas, relative to a step"),
    "guard": ("guard.py", (), "a step with and without guarded parameters"),
    "recording": ("recording.py", (), "cost of what a run records"),
    "loader": ("loader.py", (), "samples per second of data sets (one process)"),
    "offload": ("offload.py", (), "optimizer step in host memory (one process)"),
}
_ALONE = "(one process)"
_RESULTS = "bench-results"
_CALIBRATE_EPILOG = """\
examples:
  mpiexec -n 4 hpctrain bench calibrate                       about a minute, on an otherwise idle machine
  srun hpctrain bench calibrate --seconds 300                 on the nodes of a job, longer and more precise
  mpiexec -n 2 hpctrain bench calibrate --sizes 4K,1M,64M --json
  mpiexec -n 4 hpctrain bench calibrate --output site.json    to share: export HPCTRAIN_CALIBRATION=site.json

The result applies to every later job with the same number of ranks and nodes of this type, this MPI and these versions.
"""
_SHOW_EPILOG = """\
examples:
  hpctrain bench show             the calibration stored for this machine
  hpctrain bench show site.json   the content of a file, and whether it applies to this machine
"""
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_LARGEST = 2**32  # bytes of a tensor to measure
_LINE_EVERY = 10.0  # seconds between two lines without a terminal


def add_parser(subparsers: Any) -> None:
    what = "Measure the collectives, show the measurements; run the benchmarks, compare their results."
    parser = add_verb(subparsers, "bench", what, _EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_SuiteParser)
    measuring = add_action(
        actions, "calibrate", "measure which algorithm is fastest, and store the result", _CALIBRATE_EPILOG, _calibrate
    )
    seconds = quantity("a number of seconds above 0", lambda number: number > 0)
    measuring.add_argument("--seconds", type=seconds, default=60.0, help="time to measure (default: %(default)g)")
    measuring.add_argument(
        "--sizes",
        type=_sizes,
        metavar="BYTES,...",
        help="sizes of messages (default: 4 to 64M, each four times the last)",
    )
    measuring.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda (default: auto)")
    measuring.add_argument("--output", type=Path, metavar="FILE", help="write the result to this file")
    measuring.add_argument("--no-canary", action="store_true", help="do not test MPI with GPU memory")
    measuring.add_argument("-v", "--verbose", action="store_true", help="list what was not measured, and why")
    showing = add_action(actions, "show", "print the calibration stored for this machine", _SHOW_EPILOG, _show)
    showing.add_argument("file", type=Path, nargs="?", metavar="FILE", help="show this file instead")
    for name, (_, _, what) in SUITE.items():
        begin = ("", "") if what.endswith(_ALONE) else ("mpiexec -n 2 ", "srun ")
        example = "examples:\n  {}hpctrain bench {name}\n  {}hpctrain bench {name} --out results-of-today"
        example = example.format(*begin, name=name)
        one = add_action(actions, name, what, example, partial(run_benchmark, name), as_json=False)
        one.takes_all = True  # type: ignore[attr-defined]
    _add_report(actions)


def _add_report(actions: Any) -> None:
    what = "show results of benchmarks, or what differs between folders of them"
    parser = add_action(actions, "report", what, _REPORT_EPILOG, _report)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folder that a benchmark has written")
    share = quantity("a share, as 0.1", lambda number: number >= 0)
    told = "share by which equal figures may differ (default: %(default)s)"
    parser.add_argument("--tolerance", type=share, default=0.1, metavar="SHARE", help=told)
    parser.add_argument("--all", action="store_true", help="show also the figures that do not differ")
    parser.add_argument("--csv", action="store_true", help="print CSV")


class _SuiteParser(Parser):
    """Parser of an action; that of a benchmark leaves all words to its program."""

    takes_all = False

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore
        if not self.takes_all:
            return super().parse_known_args(args, namespace)
        if {"-h", "--help"} & set(args or ()):
            print(printable_lines(f"{self.description}\n\n{self.epilog}\n"))  # the program adds its usage and options
        found, _ = super().parse_known_args([], namespace)
        found.words = list(args or ())
        return found, []


def _sizes(text: str) -> list[int]:
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,10})([KMG]?)", word.strip(), re.ASCII)
        size = int(match[1]) << _UNITS[match[2]] if match else 0
        if not 1 <= size <= _LARGEST:
            raise argparse.ArgumentTypeError(
                f"{word.strip()!r:.40} is not a size from 1 to 4G bytes: write sizes as 4,64K,1M (K is 1024)"
            )
        found.append(size)
    return sorted(set(found))


# Benchmarks -----------------------------------------------------------------------------------------------------------


def run_benchmark(name: str, args: argparse.Namespace) -> int:
    """Run a benchmark in this process, which may be one of several ranks; return its exit code."""
    program, first, what = SUITE[name]
    if what.endswith(_ALONE) and (size := detect().size or 1) > 1:
        raise UsageError(f"{name} measures one process, not {size} ranks: hpctrain bench {name}", everywhere=True)
    path = Path(str(resources.files("hpctrain") / "benchmarks" / program)).resolve()
    if not path.is_file():
        raise UsageError(f"this installation has no benchmarks ({path}); install hpctrain again", everywhere=True)
    given = [*first, *args.words]
    if not any(word.partition("=")[0] in ("--out", "--results", "-h", "--help") for word in given):
        given += ["--out", _RESULTS]
    before, sys.argv = sys.argv, [str(path), *given]
    sys.path.insert(0, str(path.parent))
    harness: Any = import_module("harness.run")
    harness.called_as = f"hpctrain bench {name}"
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if {"-h", "--help"} & set(given):
            raise
        return end.code if isinstance(end.code, int) else 0
    finally:
        harness.called_as = ""
        sys.argv = before
        sys.path.remove(str(path.parent))
    return 0


def _report(args: argparse.Namespace) -> int:
    if rank_from_environment():
        return 0  # rank 0 prints for all ranks
    from hpctrain.report import benchmarks

    folders = [benchmarks.read_folder(path) for path in args.folders]
    if args.csv:
        sys.stdout.write(benchmarks.csv_of(folders))
    elif args.json:
        sys.stdout.write(benchmarks.json_of(folders, args.tolerance) + "\n")
    else:
        lines = benchmarks.lines_of(folders, args.tolerance, everything=args.all)
        print(printable_lines("\n".join(lines)))
    return 0


# calibrate ------------------------------------------------------------------------------------------------------------


def _calibrate(args: argparse.Namespace) -> int:
    from hpctrain.comm.tuning.measure import SIZES
    from hpctrain.train.calibrate import calibrate
    from hpctrain.train.init import init

    with init(device=args.device, oversubscribe=True) as job:
        progress = BenchProgress(args.seconds, shown=job.rank == 0)
        report = calibrate(
            job,
            args.sizes or SIZES,
            args.seconds,
            output=args.output,
            try_canary=not args.no_canary,
            progress=progress,
        )
        progress.close()
        if job.rank == 0:
            text = printable_lines("\n".join(_as_text(report, args.verbose)))
            print(json.dumps(_as_json(report), indent=2) if args.json else text)
    return 0


class BenchProgress:
    """Progress display: a bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, seconds: float, *, shown: bool, stream: TextIO | None = None) -> None:
        self._seconds, self._shown, self._stream = seconds, shown, stream or sys.stderr
        self._bar: Any = None
        self._last_line = 0.0

    def __call__(self, seconds: float, what: str) -> None:
        if not self._shown:
            return
        if self._stream.isatty():
            self._draw(seconds, what)
        elif seconds - self._last_line >= _LINE_EVERY:
            self._last_line = seconds
            text = f"measured for {seconds:.0f} of {self._seconds:g} s: {what}"
            print(printable_lines(text), file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _draw(self, seconds: float, what: str) -> None:
        if self._bar is None:
            from tqdm import tqdm

            form = "{desc} {bar} {n:.0f} of {total:g} s {postfix}"
            shown = {"desc": "measuring", "bar_format": form, "dynamic_ncols": True, "leave": False}
            self._bar = tqdm(total=self._seconds, file=self._stream, **shown)
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update(min(seconds, self._seconds) - self._bar.n)


def _as_json(report: CalibrationReport) -> dict[str, Any]:
    from dataclasses import asdict

    measurement = report.measurement
    return {
        "machine": asdict(report.machine),
        "table": measurement.table.to_json() if measurement else None,
        "times": measurement.times if measurement else {},
        "left_out": [
            {"rule": "/".join(key), "algorithm": name, "reason": reason}
            for (key, name), reason in report.measured.left_out.items()
        ],
        "complete": report.measured.complete,
        "canary": report.canary,
        "cuda_aware": report.verdict.cuda_aware if report.verdict else None,
        "kept": str(report.path) if report.path else None,
    }


def _as_text(report: CalibrationReport, verbose: bool) -> list[str]:
    from hpctrain.comm.tuning import table as timetable

    lines = [f"{report.measured.layout}; {report.machine}", ""]
    if report.measurement:
        lines += timetable.lines(report.measurement.table, report.measurement.times)
    else:
        lines.append("no choice of algorithms: start the calibration like the later jobs, as with mpiexec -n 4")
    lines.append("")
    if not report.measured.complete:
        lines.append("the time was over before the largest size: give more with --seconds")
    for key, name in sorted(report.measured.wrong):
        lines.append(f"{name} is excluded from {key[0]}: {report.measured.left_out[key, name]}")
    if verbose:
        lines += _left_out(report)
    lines.append(f"MPI on GPUs: {report.canary}")
    if report.path:
        from hpctrain.train.calibration import path_of

        usual = path_of(report.machine) == report.path
        hint = "" if usual else f"; export HPCTRAIN_CALIBRATION={report.path} makes jobs use it"
        lines.append(f"stored in {report.path}{hint}")
    return lines


def _left_out(report: CalibrationReport) -> list[str]:
    """Return one line per reason why algorithms were not measured."""
    reasons: dict[str, list[str]] = {}
    for (key, name), reason in report.measured.left_out.items():
        reasons.setdefault(reason, []).append(f"{'/'.join(key)} by {name}")
    return [f"not measured: {', '.join(what)}: {reason}" for reason, what in reasons.items()]


# show -----------------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    from hpctrain.comm.tuning import table as timetable

    if rank_from_environment():
        return 0  # rank 0 prints for all ranks
    from hpctrain.train.calibrate import verdict_in_words
    from hpctrain.train.calibration import mpi_name, path_of, read, this_machine

    machine = this_machine(mpi_name())
    path = args.file or path_of(machine)
    if path is None or not path.exists():
        where = f"in {args.file}" if args.file else f"for {machine} in {path or 'the home folder'}"
        raise UsageError(f"no calibration {where}: create one with mpiexec -n 4 hpctrain bench calibrate")
    found = read(path)
    differences = machine.differences(found.machine)
    used = not differences and path_of(machine) == path
    if args.json:
        print(json.dumps({"file": str(path), "in_use": used, "differences": differences, **found.to_json()}, indent=2))
        return 0
    state = "in use here" if used else f"not valid here: {', '.join(differences)}" if differences else "not in use here"
    lines = [f"{path}: {state}", str(found.machine)]
    for layout, one in found.measurements.items():
        lines += ["", f"{layout}, measured {one.date}", *timetable.lines(one.table, one.times)]
    if found.verdict:
        lines += ["", f"MPI on GPUs: {verdict_in_words(found.verdict)}"]
    print(printable_lines("\n".join(lines)))
    return 0
