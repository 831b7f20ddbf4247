"""Serve ``hpctrain job``: print the script of a job, check one, show profiles. Needs neither torch nor MPI."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from hpctrain.cli.words import WordsParser
from hpctrain.errors import EXIT_FAILURE, UsageError
from hpctrain.launch import profile as profiles
from hpctrain.launch.check import problems
from hpctrain.launch.modulefile import venv_of
from hpctrain.launch.profile import Profile
from hpctrain.launch.render import render, script_path
from hpctrain.launch.request import PROGRAM, TEMPLATES, Request, Template, run_folder
from hpctrain.launch.sweep import combine
from hpctrain.launch.wheels import srun_type
from hpctrain.settings import assign, read_toml

_EPILOG = """\
examples:
  hpctrain job slurm jobs/gpt-tiny.toml --nodes 2 --ranks-per-node 4 --time 04:00:00 --account A
  hpctrain job slurm big.toml --profile perlmutter --nodes 8 --time 12:00:00 --account m1234 --qos regular
  hpctrain job slurm --profile lumi --show-profile                      what is special there, and who says so
  hpctrain job slurm jobs/gpt-tiny.toml --time 01:00:00 --sweep train.seed=1,2,3 --at-once 2      a job array
  hpctrain job pbs big.toml --profile polaris --nodes 2 --time 01:00:00 --account A --queue prod
  hpctrain job slurm train.py --folder runs/a --nodes 2 --time 04:00:00 -- --rate 0.1        a program of your own
  hpctrain job slurm big.toml --nodes 64 --time 12:00:00 --preflight    only if no node is slow (hpctrain doctor)
  hpctrain job check my.sbatch                                          directives as strict as their manuals
  hpctrain job profiles

The script saves before the time is over and comes back, at most --restarts times, and --retries times in a row without
a new checkpoint. hpctrain submit takes the same words and submits it.
"""
_EPILOG_OF_EACH = """\
examples:
  %(prog)s jobs/gpt-tiny.toml --nodes 2 --ranks-per-node 4 --time 04:00:00 --account A
  %(prog)s jobs/gpt-tiny.toml --time 04:00:00 --set train.steps=5000 --set run.folder=runs/long
  %(prog)s jobs/gpt-tiny.toml --time 01:00:00 --sweep train.seed=1,2,3
  %(prog)s train.py --folder runs/a --nodes 2 --time 04:00:00 -- --rate 0.1

What stands behind -- goes to the program. hpctrain job --help says how the script lives.
"""
_DEFAULTS = {"slurm": "generic-slurm", "pbs": "generic-pbs"}
_PREFLIGHT = 30  # seconds, as hpctrain doctor --preflight takes
_LONGEST_NAME = 15  # characters of a job's name that every PBS takes


def add_parser(verbs: Any) -> None:
    """Add the verb and its actions to the command line."""
    parser = verbs.add_parser(
        "job",
        help="print a job script for Slurm or PBS",
        description="Print the script of a job for Slurm or PBS, or check one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=WordsParser)
    for scheduler in _DEFAULTS:
        one = add_scheduler(actions, scheduler, f"print a script for {_NAMES[scheduler]}", _print)
        one.add_argument("--show-profile", action="store_true", help="explain the profile instead")
    checking = actions.add_parser("check", help="check the directives of a script")
    checking.add_argument("script", type=Path, metavar="SCRIPT")
    checking.set_defaults(run_action=_check)
    actions.add_parser("profiles", help="list the profiles").set_defaults(run_action=_list)


_NAMES = {"slurm": "Slurm", "pbs": "PBS"}


def run(args: argparse.Namespace) -> int:
    """Carry out the action; return the exit code."""
    code: int = args.run_action(args)
    return code


def add_scheduler(
    actions: Any, scheduler: str, summary: str, run_action: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add an action for one scheduler, with all that a job may ask for."""
    parser: argparse.ArgumentParser = actions.add_parser(
        scheduler,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=_EPILOG_OF_EACH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(scheduler=scheduler, run_action=run_action)
    what = "the run's settings; or a program of your own, PROGRAM.py, its arguments behind --"
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help=what)
    _add_run(parser)
    _add_resources(parser, scheduler)
    _add_coming_back(parser)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what runs")
    group.add_argument("--template", choices=TEMPLATES, help="train (default), benchmark, or array (with --sweep)")
    setting, values = "SECTION.KEY=VALUE", "SECTION.KEY=V1,V2,..."
    told = "the run's folder; a program gives the same to job.run(checkpoints=...) (default: the config's run.folder)"
    group.add_argument("--folder", metavar="FOLDER", help=told)
    group.add_argument("--set", dest="settings", metavar=setting, action="append", default=[], help="change a setting")
    group.add_argument("--sweep", metavar=values, action="append", default=[], help="an array with a task for each")
    group.add_argument("--at-once", type=int, default=0, metavar="N", help="tasks of an array at a time (default: all)")
    group.add_argument("--profile", metavar="NAME", help="of a site; or a path (default: $HPCTRAIN_PROFILE, generic)")
    group.add_argument("--venv", metavar="FOLDER", help="a virtual environment, or none (default: this one)")
    group.add_argument("--container", default="", metavar="IMAGE", help="run in this container, or in none")
    more = "(again for more)"
    group.add_argument("--module", dest="modules", metavar="NAME", action="append", default=[], help=f"load it {more}")
    group.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help=f"set a variable {more}")


def _add_resources(parser: argparse.ArgumentParser, scheduler: str) -> None:
    group = parser.add_argument_group("what it asks for")
    group.add_argument("--time", metavar="HH:MM:SS", help="walltime; also D-HH:MM:SS")
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="(default: %(default)s)")
    group.add_argument("--ranks-per-node", type=int, metavar="N", help="(default: the profile's, else one a GPU)")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="(default: the profile's)")
    group.add_argument("--cpus-per-rank", type=int, metavar="N", help="cores (default: the profile's)")
    group.add_argument("--memory", default="", metavar="SIZE", help="of a node, as in 200G")
    group.add_argument("--account", default="", metavar="NAME")
    group.add_argument("--partition", "--queue", default="", metavar="NAME")
    if scheduler == "slurm":
        group.add_argument("--qos", default="", metavar="NAME")
        group.add_argument("--reservation", default="", metavar="NAME")
        group.add_argument("--constraint", default="", metavar="FEATURES")
        group.add_argument("--exclude", default="", metavar="NODES", help="nodes to leave out, as in n[3,7]")
    group.add_argument("--name", metavar="NAME", help="the job's (default: that of the config)")
    group.add_argument(
        "--directive", dest="directives", metavar="TEXT", action="append", default=[], help="as in --directive=--hold"
    )


def _add_coming_back(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it ends and comes back")
    for option, default, meaning in (
        ("--margin", 300, "seconds before the end at which the run is told to save"),
        ("--restarts", 20, "how often the job may come back"),
        ("--retries", 2, "of these, how often in a row without a new checkpoint"),
    ):
        group.add_argument(option, type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
    measured = f"measure the nodes before each start, for {_PREFLIGHT} s or so many, and leave if one is slow"
    group.add_argument("--preflight", type=int, nargs="?", const=_PREFLIGHT, default=0, metavar="SECONDS", help=measured)


def script_of(args: argparse.Namespace) -> tuple[str, Request, Profile]:
    """Return the script that the command line asks for, and what it was made of."""
    profile, _ = _profile(args)
    request = _request(args, profile)
    venv = request.venv or venv_of((*profile.modules, *request.modules), os.environ)
    if venv and profile.launcher == "srun" and not profile.mpi:
        profile = replace(profile, mpi=srun_type(venv))
    return render(request, profile), request, profile


def _profile(args: argparse.Namespace) -> tuple[Profile, str]:
    name = args.profile or os.environ.get("HPCTRAIN_PROFILE") or _DEFAULTS[args.scheduler]
    profile, where = profiles.load(name)
    if profile.scheduler != args.scheduler:
        raise UsageError(f"profile {where} is for {profile.scheduler}, not for {args.scheduler}")
    return profile, where


def _request(args: argparse.Namespace, profile: Profile) -> Request:
    """Return what the command line asks for, the profile's numbers where it names none."""
    if not args.config:
        raise UsageError("CONFIG.toml is missing: the settings of the run, as for hpctrain train, or a program.py")
    if not args.time:
        raise UsageError("--time is missing: how long the job may run, as in --time 04:00:00")
    sweep = combine(args.sweep)
    gpus = profile.gpus_per_node if args.gpus_per_node is None else args.gpus_per_node
    return Request(
        config=args.config,
        folder=_folder(args),
        time=args.time,
        template=_template(args),
        name=_name(args),
        nodes=args.nodes,
        ranks_per_node=_first(args.ranks_per_node, profile.ranks_per_node or gpus, 1),
        gpus_per_node=gpus,
        cpus_per_rank=_first(args.cpus_per_rank, profile.cpus_per_rank, 1),
        sweep=sweep,
        venv=_venv(args, profile),
        modules=tuple(args.modules),
        environment=_environment(args.env),
        settings=_settings(args),
        words=tuple(args.words),
        directives=tuple(args.directives),
        **{name: getattr(args, name) for name in _ALIKE if hasattr(args, name)},
    )


_ALIKE = (
    *("account", "partition", "qos", "reservation", "constraint", "exclude", "memory", "container"),
    *("at_once", "margin", "restarts", "retries", "preflight"),
)


def _first(given: int | None, profile: int, default: int) -> int:
    return given if given is not None else profile or default


def _template(args: argparse.Namespace) -> Template:
    named: Template | None = args.template
    return named or ("array" if args.sweep else "train")


def _folder(args: argparse.Namespace) -> str:
    """Return the run's folder, which the script watches: a program alone knows its own, so it has to be told."""
    if args.config.endswith(PROGRAM):
        if not Path(args.config).is_file():
            raise UsageError(f"there is no program {args.config} here: paths are relative to where you submit")
        if not args.folder:
            raise UsageError(f"--folder is missing: where {args.config} keeps its run, as in --folder runs/a")
        return str(args.folder)
    tree = read_toml(args.config)
    for text in _settings(args):
        assign(tree, text)
    return run_folder(tree, args.config)


def _settings(args: argparse.Namespace) -> tuple[str, ...]:
    """Return what changes in the config; a folder is the setting of that name."""
    given = args.folder and not args.config.endswith(PROGRAM)
    return (*args.settings, *([f"run.folder={args.folder}"] if given else []))


def _name(args: argparse.Namespace) -> str:
    if args.name is not None:
        return str(args.name)
    stem = PurePosixPath(args.config).stem
    return stem[:_LONGEST_NAME] if args.scheduler == "pbs" else stem


def _venv(args: argparse.Namespace, profile: Profile) -> str:
    """Return the virtual environment of the job: this command's own, unless something else brings the program."""
    if args.venv is not None:
        return "" if args.venv == "none" else str(args.venv)
    modules = (*profile.modules, *args.modules)
    container = args.container or profile.container
    if container not in ("", "none") or any(name.partition("/")[0] == "hpctrain" for name in modules):
        return ""
    return sys.prefix if sys.prefix != sys.base_prefix else ""


def _environment(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise UsageError(f"--env {text[:40]!r}: write it as NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _print(args: argparse.Namespace) -> int:
    if args.show_profile:
        print(profiles.explain(*_profile(args)))
        return 0
    script, request, profile = script_of(args)
    sys.stdout.write(script)
    path = script_path(request, profile)
    print(f"save it as {path}: its output goes there, and the folder must be there when it starts", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> int:
    try:
        script = args.script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {args.script}: {reason}") from error
    found = problems(script)
    for text in found or ["its directives are right"]:
        print(f"{args.script}: {text}")
    return EXIT_FAILURE if found else 0


def _list(args: argparse.Namespace) -> int:
    for name in profiles.names():
        profile, where = profiles.load(name)
        told = profile.site if where.startswith(name) else f"{profile.site} ({where})".strip()
        print(f"{name:14} {profile.scheduler:5}  {told}; {profile.tried}")
    return 0
