"""Verb ``hpctrain watch``: shows runs in a terminal, from their files alone. Needs neither torch nor MPI."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cli.main import add_verb
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.watch.state import RunState

_EPILOG = """\
examples:
  hpctrain watch runs/gpt-tiny                one run: progress, curves, use of time; q quits
  hpctrain watch runs                         all runs below a folder as a table; enter shows one of them
  hpctrain watch runs/a runs/b --every 10     read the files every 10 seconds
  hpctrain watch runs --once                  print it and leave, as for a script or a mail
  hpctrain watch runs --json                  the same for programs

The view reads files only: run it on a login node while the job runs elsewhere. Of large metrics files it reads the end,
and single rows in between.
"""


def add_parser(verbs: Any) -> None:
    what = "Show runs in the terminal: progress, ETA, curves, use of time, slow and dead ranks."
    parser = add_verb(verbs, "watch", what, _EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, or a folder of runs")
    parser.add_argument("--every", type=_seconds, default=2.0, metavar="S", help="seconds between reads (default: 2)")
    parser.add_argument("--once", action="store_true", help="print the view and leave")
    parser.add_argument("--json", action="store_true", help="print JSON and leave")


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.1 <= found <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds from 0.1 to 3600")
    return found


def _plain(state: RunState) -> dict[str, Any]:
    """Return the facts of a state for JSON, without those of earlier starts."""
    facts = asdict(replace(state, attempts=())) | {"folder": str(state.folder), "starts": state.starts}
    return {name: value for name, value in facts.items() if name != "attempts"}


def run(args: argparse.Namespace) -> int:
    """Show the runs; return the exit code."""
    from hpctrain.train.receipt.read import runs_in
    from hpctrain.watch.state import read_state

    folders = list(dict.fromkeys(folder for named in args.runs for folder in runs_in(named)))
    if args.json:
        states = [_plain(read_state(folder)) for folder in folders]
        print(json.dumps(states, indent=2))
        return 0
    if len(folders) == 1:
        read_state(folders[0])  # raises for a folder that is no run
    try:
        from rich.console import Console

        importlib.import_module("plotext")  # imported for the first picture only
        from hpctrain.watch.live import watch
        from hpctrain.watch.screen import picture, states_of
    except ImportError as error:
        raise UsageError(
            f"hpctrain watch needs {error.name}: pip install 'hpctrain[watch]' (without it: --json, hpctrain receipt)"
        ) from error

    console = Console(highlight=False, soft_wrap=False)
    if args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        console.print(picture(states_of(folders), console))
        return 0
    watch(folders, args.every, console)
    return 0
