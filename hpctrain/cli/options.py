"""Command line options that several verbs share: actions, arguments after ``--``, options of a job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.cli.main import Parser
from hpctrain.jobs.request import TEMPLATES


def action(
    actions: Any, name: str, summary: str, epilog: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add an action with its help text and the common option ``--json``; return its parser."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run_action=run)
    return parser


# Arguments after ``--``, which are passed to the program that a job runs ----------------------------------------------


class WordsParser(Parser):
    """Parser whose own arguments end at ``--``; the words after it are stored in ``words``."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore
        """Parse the arguments before ``--``."""
        given = list(sys.argv[1:] if args is None else args)
        own = given[: given.index("--")] if "--" in given else given
        found, unknown = super().parse_known_args(own, namespace)
        found.words = given[len(own) + 1 :]
        return found, unknown


# Command line options of a job, for ``hpctrain job`` and ``hpctrain submit`` ------------------------------------------


_EPILOG_OF_EACH = """\
examples:
  %(prog)s jobs/gpt-tiny.toml --nodes 2 --ranks-per-node 4 --time 04:00:00 --account A
  %(prog)s jobs/gpt-tiny.toml --time 04:00:00 --set train.steps=5000 --set run.folder=runs/long
  %(prog)s jobs/gpt-tiny.toml --time 01:00:00 --sweep train.seed=1,2,3
  %(prog)s train.py --folder runs/a --nodes 2 --time 04:00:00 -- --rate 0.1

Arguments after -- are passed to the program. hpctrain job --help describes the job's restarts.
"""
PREFLIGHT = 30  # seconds, the default of hpctrain doctor --preflight


def add_scheduler(
    actions: Any, scheduler: str, summary: str, run_action: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add an action for one scheduler, with all options of a job."""
    parser: argparse.ArgumentParser = actions.add_parser(
        scheduler,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_EPILOG_OF_EACH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(scheduler=scheduler, run_action=run_action)
    what = "the run's settings; or your own program, PROGRAM.py, with its arguments after --"
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help=what)
    _add_run(parser)
    _add_resources(parser, scheduler)
    _add_restarts(parser)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("--template", choices=TEMPLATES, help="train (default), benchmark, or array (with --sweep)")
    setting, values = "SECTION.KEY=VALUE", "SECTION.KEY=V1,V2,..."
    told = "the run's folder; a program passes the same to job.run(checkpoints=...) (default: the config's run.folder)"
    group.add_argument("--folder", metavar="FOLDER", help=told)
    group.add_argument("--set", dest="settings", metavar=setting, action="append", default=[], help="change a setting")
    group.add_argument("--sweep", metavar=values, action="append", default=[], help="an array, one task per value")
    group.add_argument("--at-once", type=int, default=0, metavar="N", help="concurrent tasks (default: all)")
    group.add_argument("--profile", metavar="NAME", help="of a site, or a path (default: $HPCTRAIN_PROFILE, generic)")
    group.add_argument("--venv", metavar="FOLDER", help="a virtual environment, or none (default: this one)")
    group.add_argument("--container", default="", metavar="IMAGE", help="run in this container (default: none)")
    more = "(repeatable)"
    group.add_argument("--module", dest="modules", metavar="NAME", action="append", default=[], help=f"module {more}")
    group.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help=f"variable {more}")


def _add_resources(parser: argparse.ArgumentParser, scheduler: str) -> None:
    group = parser.add_argument_group("resources")
    group.add_argument("--time", metavar="HH:MM:SS", help="walltime; also D-HH:MM:SS")
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="(default: %(default)s)")
    group.add_argument("--ranks-per-node", type=int, metavar="N", help="(default: the profile's, else one per GPU)")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="(default: the profile's)")
    group.add_argument("--cpus-per-rank", type=int, metavar="N", help="cores (default: the profile's)")
    group.add_argument("--memory", default="", metavar="SIZE", help="per node, as in 200G")
    group.add_argument("--account", default="", metavar="NAME")
    group.add_argument("--partition", "--queue", default="", metavar="NAME")
    if scheduler == "slurm":
        group.add_argument("--qos", default="", metavar="NAME")
        group.add_argument("--reservation", default="", metavar="NAME")
        group.add_argument("--constraint", default="", metavar="FEATURES")
        group.add_argument("--exclude", default="", metavar="NODES", help="nodes to exclude, as in n[3,7]")
    group.add_argument("--name", metavar="NAME", help="job name (default: that of the config)")
    group.add_argument(
        "--directive", dest="directives", metavar="TEXT", action="append", default=[], help="as in --directive=--hold"
    )


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("end and restarts")
    for option, default, meaning in (
        ("--margin", 300, "seconds before the end at which the job signals the run to save"),
        ("--restarts", 20, "how often the job may restart"),
        ("--retries", 2, "of these, how many in a row without a new checkpoint"),
    ):
        group.add_argument(option, type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
    measured = f"measure the nodes before each start, for {PREFLIGHT} s or SECONDS, and exit if one is slow"
    group.add_argument("--preflight", type=int, nargs="?", const=PREFLIGHT, default=0, metavar="SECONDS", help=measured)
