"""Options of a job, which ``hpctrain job`` and ``hpctrain submit`` have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpctrain.cli.main import Parser, add_action
from hpctrain.jobs.request import PROGRAM, TEMPLATES


class WordsParser(Parser):
    """Parser whose own arguments end at ``--``; the words after it are stored in ``words``."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore
        """Parse the arguments before ``--``; an error names a program whose words should follow it."""
        given = list(sys.argv[1:] if args is None else args)
        own = given[: given.index("--")] if "--" in given else given
        found, unknown = super().parse_known_args(own, namespace)
        found.words = given[len(own) + 1 :]
        config = getattr(found, "config", None) or ""
        if config == "run" and not Path(config).is_file():
            program = next((word for word in [*unknown, *found.words] if word.endswith(PROGRAM)), "train.py")
            self.error(f"run and its program come after --, as in --folder runs/a --time 04:00:00 -- run {program}")
        if config.endswith(PROGRAM) and unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}; those of {config} come after --")
        return found, unknown


_EPILOG_OF_EACH = """\
examples:
  %(prog)s jobs/gpt-tiny.toml --nodes 2 --ranks-per-node 4 --time 04:00:00 --account A
  %(prog)s jobs/gpt-tiny.toml --time 04:00:00 --set train.steps=5000 --set run.folder=runs/long
  %(prog)s jobs/gpt-tiny.toml --time 01:00:00 --sweep train.seed=1,2,3
  %(prog)s train.py --folder runs/a --nodes 2 --time 04:00:00 -- --rate 0.1

Arguments after -- are passed to the program; -- run PROGRAM starts one for torchrun, by hpctrain run.
hpctrain job prints the script that hpctrain submit submits; hpctrain job --help describes the job's restarts.
"""
PREFLIGHT = 30  # seconds, the default of hpctrain doctor --preflight


_EPILOG_OF_SLURM = """
Each start of a job with --nodes 2-8, also a restart, gets as many of 2 to 8 nodes as are free.
"""


def add_scheduler(
    actions: Any, scheduler: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add an action for one scheduler, with all options of a job."""
    epilog = _EPILOG_OF_EACH + (_EPILOG_OF_SLURM if scheduler == "slurm" else "")
    parser = add_action(actions, scheduler, summary, epilog, run, as_json=False, allow_abbrev=False)
    parser.set_defaults(scheduler=scheduler)
    what = "the run's settings; or your own program, PROGRAM.py, with its arguments after --; or none: -- run PROGRAM"
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help=what)
    _add_run(parser)
    _add_resources(parser, scheduler)
    _add_restarts(parser)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("--template", choices=TEMPLATES, help="train (default), benchmark, or array (with --sweep)")
    told = "the run's folder; a program passes the same to job.run(checkpoints=...) (default: the config's run.folder)"
    group.add_argument("--folder", metavar="FOLDER", help=told)
    _add_list(group, "--set", "settings", "SECTION.KEY=VALUE", "change a setting (repeatable)")
    _add_list(group, "--sweep", "sweep", "SECTION.KEY=V1,V2,...", "a job array, one task per value")
    group.add_argument("--at-once", type=int, default=0, metavar="N", help="concurrent tasks (default: all)")
    group.add_argument("--profile", metavar="NAME", help="profile of a site, or a path (default: $HPCTRAIN_PROFILE)")
    group.add_argument("--venv", metavar="FOLDER", help="virtual environment to use, or none (default: this one)")
    copied = (
        "copy to the nodes before each start: env (the environment), data (the config's files), container, other files"
    )
    group.add_argument("--stage", default="", metavar="WHAT,...", help=copied)
    group.add_argument("--container", default="", metavar="IMAGE", help="run in this container (default: none)")
    options = "more options of the container, as in --container-options='--bind /scratch'; --nv and --rocm are its own"
    group.add_argument("--container-options", default="", metavar="TEXT", help=options)
    _add_list(group, "--module", "modules", "NAME", "module to load (repeatable)")
    _add_list(group, "--env", "env", "NAME=VALUE", "variable to set (repeatable)")


def _add_list(group: Any, option: str, dest: str, metavar: str, meaning: str) -> None:
    group.add_argument(option, dest=dest, metavar=metavar, action="append", default=[], help=meaning)


def _add_resources(parser: argparse.ArgumentParser, scheduler: str) -> None:
    group = parser.add_argument_group("resources")
    group.add_argument("--time", metavar="HH:MM:SS", help="walltime; also D-HH:MM:SS")
    ranges = ", or as many as are free, as in 2-8" if scheduler == "slurm" else ""
    metavar = "N|MIN-MAX" if scheduler == "slurm" else "N"
    group.add_argument("--nodes", default=1, metavar=metavar, help=f"nodes{ranges} (default: %(default)s)")
    group.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="ranks (default: the profile's, else one per GPU)"
    )
    spares = "further nodes, on which the run starts again at once if a node dies (default: none)"
    group.add_argument("--spares", type=int, default=0, metavar="N", help=spares)
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs (default: the profile's)")
    group.add_argument("--cpus-per-rank", type=int, metavar="N", help="cores per rank (default: the profile's)")
    group.add_argument("--memory", default="", metavar="SIZE", help="memory per node, as in 200G")
    group.add_argument("--account", default="", metavar="NAME", help="account or project that pays for the job")
    group.add_argument("--partition", "--queue", default="", metavar="NAME", help="(default: the profile's)")
    if scheduler == "slurm":
        group.add_argument("--qos", default="", metavar="NAME", help="quality of service (default: the profile's)")
        group.add_argument("--reservation", default="", metavar="NAME", help="reserved nodes to use")
        group.add_argument("--constraint", default="", metavar="FEATURES", help="features that nodes must have")
        group.add_argument("--exclude", default="", metavar="NODES", help="nodes to exclude, as in n[3,7]")
    group.add_argument("--name", metavar="NAME", help="job name (default: that of the config)")
    _add_list(group, "--directive", "directives", "TEXT", "another directive, as in --directive=--hold")


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("end and restarts")
    for option, default, meaning in (
        ("--margin", 300, "seconds before the end at which the job tells the run to save"),
        ("--restarts", 20, "how often the job may restart"),
        ("--retries", 2, "of these, how many in a row without a new checkpoint"),
    ):
        group.add_argument(option, type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
    measured = f"measure the nodes before each start, for {PREFLIGHT} s or SECONDS, and exit if one is slow"
    group.add_argument("--preflight", type=int, nargs="?", const=PREFLIGHT, default=0, metavar="SECONDS", help=measured)
