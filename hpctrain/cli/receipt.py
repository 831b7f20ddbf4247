"""Verb ``hpctrain receipt``: prints what a run cost and where its time was spent. Needs neither torch nor MPI."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hpctrain.cli.main import add_verb
from hpctrain.util.text import printable_lines

_EPILOG = """\
examples:
  hpctrain receipt runs/gpt-tiny                    every attempt: date, nodes, use of time, end
  hpctrain receipt runs/gpt-tiny --json             times in seconds, energy in joules
  hpctrain receipt runs/gpt-tiny -o timeline.svg    the attempts over time: .svg, .png or .pdf
  hpctrain receipt runs/sweep                       all tasks of a job array, one line per task, and their total

Useful time is the time of steps that the newest checkpoint includes. Lost time is the time of a start before its first
step, of steps that are repeated because no checkpoint had them, and of waiting for checkpoints. If Slurm's accounting
measures energy, the receipt includes it.
"""


def add_parser(verbs: Any) -> None:
    what = "Report the attempts of a run: why each ended, useful and lost time, node-hours."
    parser = add_verb(verbs, "receipt", what, _EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, or of a job array")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="draw a picture: .svg, .png or .pdf")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the receipts, and draw them if requested; return the exit code."""
    from hpctrain.train.receipt.read import load, runs_in
    from hpctrain.train.receipt.render import draw, text, to_json

    receipts = load([folder for named in args.runs for folder in runs_in(named)])
    if args.output is not None:
        draw(receipts, args.output)
    print(json.dumps(to_json(receipts), indent=2) if args.json else printable_lines("\n".join(text(receipts))))
    return 0
