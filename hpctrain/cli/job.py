"""Verb ``hpctrain job``: prints or checks a job script, and shows site profiles. Needs neither torch nor MPI."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from hpctrain.cli.options import WordsParser, add_scheduler
from hpctrain.errors import EXIT_FAILURE, UsageError
from hpctrain.jobs import profile as profiles
from hpctrain.jobs.check import problems
from hpctrain.jobs.modulefile import venv_of
from hpctrain.jobs.profile import Profile, srun_type
from hpctrain.jobs.render import render, script_path
from hpctrain.jobs.request import PROGRAM, Request, Template, combine, run_folder
from hpctrain.settings import assign, read_toml
from hpctrain.train.config import load as load_settings
from hpctrain.util.reading import read_text, reason
from hpctrain.util.text import printable, printable_lines

_EPILOG = """\
examples:
  hpctrain job slurm jobs/gpt-tiny.toml --nodes 2 --ranks-per-node 4 --time 04:00:00 --account A
  hpctrain job slurm big.toml --profile perlmutter --nodes 8 --time 12:00:00 --account m1234 --qos regular
  hpctrain job slurm --profile lumi --show-profile                      its site-specific options and their sources
  hpctrain job slurm jobs/gpt-tiny.toml --time 01:00:00 --sweep train.seed=1,2,3 --at-once 2      a job array
  hpctrain job pbs big.toml --profile polaris --nodes 2 --time 01:00:00 --account A --queue prod
  hpctrain job slurm train.py --folder runs/a --nodes 2 --time 04:00:00 -- --rate 0.1        your own program
  hpctrain job slurm big.toml --nodes 64 --time 12:00:00 --preflight    starts only if no node is slow
  hpctrain job check my.sbatch                                          checks directives against the manuals
  hpctrain job profiles

The job saves before its time is over and restarts, at most --restarts times, and --retries times in a row
without a new checkpoint. hpctrain submit has the same options and submits it.
"""
_DEFAULTS = {"slurm": "generic-slurm", "pbs": "generic-pbs"}
_LONGEST_NAME = 15  # characters of a job name that every PBS version accepts


def add_parser(verbs: Any) -> None:
    """Add the verb and its actions to the command line."""
    parser = verbs.add_parser(
        "job",
        help="print a job script for Slurm or PBS",
        description="Print or check the script of a job for Slurm or PBS.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=WordsParser)
    for scheduler in _DEFAULTS:
        one = add_scheduler(actions, scheduler, f"print a script for {_NAMES[scheduler]}", _print)
        one.add_argument("--show-profile", action="store_true", help="explain the profile instead")
    checking = _add_action(actions, "check", "check the directives of a script", "%(prog)s my.sbatch")
    checking.add_argument("script", type=Path, metavar="SCRIPT")
    checking.set_defaults(run_action=_check)
    _add_action(actions, "profiles", "list the profiles of sites", "%(prog)s").set_defaults(run_action=_list)


def _add_action(actions: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"examples:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


_NAMES = {"slurm": "Slurm", "pbs": "PBS"}


def run(args: argparse.Namespace) -> int:
    """Run the action; return the exit code."""
    code: int = args.run_action(args)
    return code


def script_of(args: argparse.Namespace) -> tuple[str, Request, Profile]:
    """Return the script that the command line describes, with its request and profile."""
    profile, _ = _profile(args)
    request = _request(args, profile)
    _check_config(request)
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
    """Return the request on the command line, with the profile's values as defaults."""
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
    """Return the run folder, which the script watches; for a program, the command line must name it."""
    if args.config.endswith(PROGRAM):
        if not Path(args.config).is_file():
            raise UsageError(f"no such program: {args.config}; paths are relative to the folder of submission")
        if not args.folder:
            raise UsageError(f"--folder is missing: where {args.config} keeps its run, as in --folder runs/a")
        return str(args.folder)
    tree = read_toml(args.config)
    for text in _settings(args):
        assign(tree, text)
    return run_folder(tree, args.config)


def _settings(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the changes to the config; ``--folder`` changes the setting ``run.folder``."""
    given = args.folder and not args.config.endswith(PROGRAM)
    return (*args.settings, *([f"run.folder={args.folder}"] if given else []))


def _check_config(request: Request) -> None:
    """Raise ``SettingsError`` for settings that the job would refuse at its start, in any task of a sweep."""
    if not request.is_program:
        for task in request.sweep or ((),):
            load_settings(request.config, (*request.settings, *task))


def _name(args: argparse.Namespace) -> str:
    if args.name is not None:
        return str(args.name)
    stem = PurePosixPath(args.config).stem
    return stem[:_LONGEST_NAME] if args.scheduler == "pbs" else stem


def _venv(args: argparse.Namespace, profile: Profile) -> str:
    """Return the job's virtual environment: that of this command, unless a module or container provides hpctrain."""
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
        print(printable_lines(profiles.explain(*_profile(args))))
        return 0
    script, request, profile = script_of(args)
    sys.stdout.write(script)
    path = script_path(request, profile)
    advice = f"save it as {path}: its output goes to that folder, which must exist when the job starts"
    print(printable_lines(advice), file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> int:
    try:
        script = read_text(args.script)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {args.script}: {reason(error)}") from error
    found = problems(script)
    for text in found or ["its directives are valid"]:
        print(printable(f"{args.script}: {text}"))
    return EXIT_FAILURE if found else 0


def _list(args: argparse.Namespace) -> int:
    for name in profiles.names():
        profile, where = profiles.load(name)
        text = profile.site if where.startswith(name) else f"{profile.site} ({where})".strip()
        print(printable_lines(f"{name:14} {profile.scheduler:5}  {text}; {profile.tried}"))
    return 0
