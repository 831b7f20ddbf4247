"""Verb ``hpctrain report``: writes a page about runs, or files for trackers, from the runs' files alone.

Needs neither torch nor MPI.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
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
  hpctrain report runs/a --to csv -o a.csv              all values of all steps
  hpctrain report runs --to tensorboard -o events       for tensorboard --logdir events

The page is one file, without anything from a network. It holds the curves, the use of time, the starts of each run and
how they ended, node-hours, failures, settings and environment; with train.trace = true also the use of time of each
rank and the timeline of a step.

--to mlflow writes to the server in MLFLOW_TRACKING_URI, or into a folder. --to wandb writes an offline run for
wandb sync, or sends it if WANDB_MODE is online.
"""
_TO = ("html", "csv", "tensorboard", "mlflow", "wandb")


def add_parser(verbs: Any) -> None:
    what = "Write a page about runs: curves, use of time, scaling, failures, settings; or files for trackers."
    parser = add_verb(verbs, "report", what, _EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, or a folder of runs")
    parser.add_argument("--to", choices=_TO, default="html", help="a page, or the files of a tracker (default: html)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PATH", help="file or folder (default: in the run's folder)"
    )


def sections_of(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return the sections of a page about some runs, in their order."""
    from hpctrain.report import curves, memory, summary, times

    parts = (curves.sections, times.sections, memory.sections, summary.sections)
    return [summary.overview(runs), *(section for sections in parts for section in sections(runs))]


def run(args: argparse.Namespace) -> int:
    """Write the page or the files; return the exit code."""
    from hpctrain.report.runs import read_runs, readable
    from hpctrain.train.receipt.read import runs_in

    for form, suffixes in (("html", (".html", ".htm")), ("csv", (".csv",))):
        if args.to == form and args.output is not None and args.output.suffix not in suffixes:
            raise UsageError(f"cannot write {args.output}: the name must end in {suffixes[0]}")
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise UsageError(f"cannot write {args.output}: there is no folder {args.output.parent}")
    folders, left_out = readable(list(dict.fromkeys(folder for named in args.runs for folder in runs_in(named))))
    runs = read_runs(folders)
    for why in left_out:
        print(printable(f"warning: left out: {why}"), file=sys.stderr)
    write: Callable[[Sequence[ReportedRun], Path], str]
    if args.to == "html":
        write, name = _to_page, "report.html"
    else:
        from hpctrain.report.trackers import TRACKERS

        write, name = TRACKERS[args.to]
    output = args.output if args.output is not None else args.runs[0] / name
    try:
        said = write(runs, output)
    except ImportError as error:
        extra = "report" if args.to == "html" else "trackers"
        raise UsageError(
            f"hpctrain report --to {args.to} needs {error.name}: pip install 'hpctrain[{extra}]'"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from error
    print(printable(said))
    return 0


def _to_page(runs: Sequence[ReportedRun], output: Path) -> str:
    from hpctrain.report.page import write_page

    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return f"wrote {output}, {format_bytes(write_page(title, sections_of(runs), output))}"
