"""Verb ``hpctrain report``: writes an HTML page of runs, from their files alone. Needs neither torch nor MPI."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cli.main import add_verb
from hpctrain.errors import UsageError
from hpctrain.util.text import format_bytes, printable

if TYPE_CHECKING:
    from hpctrain.report.page import Section
    from hpctrain.report.runs import ReportedRun

_EPILOG = """\
examples:
  hpctrain report runs/gpt-tiny                         one page: runs/gpt-tiny/report.html
  hpctrain report runs/a runs/b -o compare.html         both in each figure, and what differs in their settings
  hpctrain report runs/scaling -o scaling.html          all runs below a folder: speed-up over the number of ranks

The page is one file, without anything from a network. It holds the curves, the use of time, the starts of each run and
how they ended, node-hours, failures, settings and environment; with train.trace = true also the use of time of each
rank and the timeline of a step.
"""


def add_parser(verbs: Any) -> None:
    what = "Write a page about runs: curves, use of time, scaling, failures, settings."
    parser = add_verb(verbs, "report", what, _EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, or a folder of runs")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page (default: report.html in the folder)"
    )


def sections_of(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return the sections of a page about some runs, in their order."""
    from hpctrain.report import curves, summary, times

    return [summary.overview(runs), *curves.sections(runs), *times.sections(runs), *summary.sections(runs)]


def run(args: argparse.Namespace) -> int:
    """Write the page; return the exit code."""
    from hpctrain.report.runs import read_runs
    from hpctrain.train.receipt.read import runs_in

    output = args.output if args.output is not None else args.runs[0] / "report.html"
    if output.suffix not in (".html", ".htm"):
        raise UsageError(f"cannot write {output}: the name of a page must end in .html")
    runs = read_runs(list(dict.fromkeys(folder for named in args.runs for folder in runs_in(named))))
    try:
        from hpctrain.report.page import write_page
    except ImportError as error:
        raise UsageError(f"hpctrain report needs {error.name}: pip install 'hpctrain[report]'") from error
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    try:
        size = write_page(title, sections_of(runs), output)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from error
    print(printable(f"wrote {output}, {format_bytes(size)}"))
    return 0
