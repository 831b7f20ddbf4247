"""Verb ``hpctrain job``: prints or checks a job script, and shows site profiles. Needs neither torch nor MPI."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from hpctrain.cli.main import Parser, add_action, add_verb, parser_with
from hpctrain.cli.run import DEFAULT, check_program
from hpctrain.data.settings import data_files
from hpctrain.errors import EXIT_FAILURE, UsageError
from hpctrain.jobs import profile as profiles
from hpctrain.jobs.check import problems
from hpctrain.jobs.modulefile import venv_of
from hpctrain.jobs.profile import Profile, srun_type, with_tolerance
from hpctrain.jobs.render import render, script_path
from hpctrain.jobs.request import PROGRAM, TEMPLATES, Request, combine, node_range, run_folder
from hpctrain.jobs.staging import check_files
from hpctrain.jobs.template import SCHEDULERS
from hpctrain.settings import assign, read_toml
from hpctrain.stage.local import PACKED
from hpctrain.train.config import check_node_counts
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
  hpctrain job slurm --folder runs/a --nodes 2 --time 04:00:00 -- run train.py --rate 0.1    one for torchrun
  hpctrain job slurm big.toml --nodes 64 --time 12:00:00 --preflight    starts only if no node is slow
  hpctrain job slurm big.toml --nodes 2-8 --time 12:00:00               takes up to 8 nodes, those that are free
  hpctrain job slurm big.toml --nodes 64 --spares 1 --time 12:00:00     continues on a spare node if one dies
  hpctrain job check my.sbatch                                          checks directives against the manuals
  hpctrain job profiles

The job saves before its time is over and restarts, at most --restarts times, and --retries times in a row
without a new checkpoint. hpctrain submit has the same options and submits it.
"""
_LONGEST_NAME = 15  # characters of a job name that every PBS version accepts


def add_parser(verbs: Any) -> None:
    parser = add_verb(verbs, "job", "Print or check the script of a job for Slurm or PBS.", _EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=WordsParser)
    for name, scheduler in SCHEDULERS.items():
        one = add_scheduler(actions, name, f"print a job script for {scheduler.title}", _print)
        one.add_argument("--show-profile", action="store_true", help="explain the profile instead")
    example = "examples:\n  %(prog)s my.sbatch"
    checking = add_action(actions, "check", "check the directives of a job script", example, _check, as_json=False)
    checking.add_argument("script", type=Path, metavar="SCRIPT", help="a job script for Slurm or PBS")
    what = "list the profiles of sites, with their schedulers"
    add_action(actions, "profiles", what, "examples:\n  %(prog)s", _list, as_json=False)


def script_of(args: argparse.Namespace) -> tuple[str, Request, Profile]:
    """Return the script that the command line describes, with its request and profile."""
    _take_runner(args)
    profile, _ = _profile(args)
    request = _request(args, profile)
    survives = False
    if not request.is_program:
        for task in request.sweep or ((),):  # the job would refuse wrong settings at its start
            settings = load_settings(request.config, (*request.settings, *task))
            survives |= settings.run.on_failure == "shrink" and request.template != "benchmark"
            if request.most_nodes and args.scheduler == "slurm" and request.template != "benchmark":
                check_node_counts(settings, request.node_counts, request.ranks_per_node)
    venv = request.venv or venv_of((*profile.modules, *request.modules), os.environ)
    if survives:
        profile = with_tolerance(profile, venv)
    if venv and profile.launcher == "srun" and not profile.mpi:
        profile = replace(profile, mpi=srun_type(venv))
    return render(request, profile), request, profile


def _take_runner(args: argparse.Namespace) -> None:
    """Split ``-- run PROGRAM ARGS`` into the program, its arguments, and the options of ``hpctrain run``."""
    args.runner = []
    if args.config or args.words[:1] != ["run"]:
        return
    given = parser_with({"run"}).parse_args(args.words)
    check_program(given.backend, given.program, module=given.module)
    backend = [] if given.backend == DEFAULT else ["--backend", given.backend]
    args.runner = ["run", *backend, *(["-m"] if given.module else [])]
    args.config, args.words = given.program, given.words


def _profile(args: argparse.Namespace) -> tuple[Profile, str]:
    name = args.profile or os.environ.get("HPCTRAIN_PROFILE") or f"generic-{args.scheduler}"
    profile, where = profiles.load(name)
    if profile.scheduler != args.scheduler:
        raise UsageError(f"profile {where} is for {profile.scheduler}, not for {args.scheduler}")
    return profile, where


def _request(args: argparse.Namespace, profile: Profile) -> Request:
    """Return the request on the command line, with the profile's values as defaults."""
    if not args.config:
        raise UsageError(
            "CONFIG.toml is missing: the settings of the run, as for hpctrain train, or a program.py; "
            "or -- run PROGRAM.py, as for hpctrain run"
        )
    if not args.time:
        raise UsageError("--time is missing: how long the job may run, as in --time 04:00:00")
    gpus = profile.gpus_per_node if args.gpus_per_node is None else args.gpus_per_node
    nodes, most_nodes = node_range(str(args.nodes))
    return Request(
        config=args.config,
        folder=_folder(args),
        time=args.time,
        template=args.template or ("array" if args.sweep else "train"),
        name=_name(args),
        nodes=nodes,
        most_nodes=most_nodes,
        ranks_per_node=_first(args.ranks_per_node, profile.ranks_per_node or gpus, 1),
        gpus_per_node=gpus,
        cpus_per_rank=_first(args.cpus_per_rank, profile.cpus_per_rank, 1),
        sweep=combine(args.sweep),
        venv=_venv(args, profile),
        **_staged(args, _venv(args, profile), args.container or profile.container),
        modules=tuple(args.modules),
        environment=_environment(args.env),
        settings=_settings(args),
        words=tuple(args.words),
        runner=tuple(args.runner),
        directives=tuple(args.directives),
        **{name: getattr(args, name) for name in _ALIKE if hasattr(args, name)},
    )


_ALIKE = (
    *("account", "partition", "qos", "reservation", "constraint", "exclude", "memory", "container"),
    *("at_once", "margin", "restarts", "retries", "preflight", "spares"),
)


def _first(given: int | None, profile: int, default: int) -> int:
    return given if given is not None else profile or default


def _folder(args: argparse.Namespace) -> str:
    """Return the run folder, which the script watches; for a program, the command line must name it."""
    if args.runner or args.config.endswith(PROGRAM):
        if not args.runner and not Path(args.config).is_file():
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
    given = args.folder and not args.runner and not args.config.endswith(PROGRAM)
    return (*args.settings, *([f"run.folder={args.folder}"] if given else []))


def _name(args: argparse.Namespace) -> str:
    if args.name is not None:
        return str(args.name)
    is_module = args.runner and not args.config.endswith(PROGRAM)
    stem = args.config.rpartition(".")[2] if is_module else PurePosixPath(args.config).stem
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


def _staged(args: argparse.Namespace, venv: str, image: str) -> dict[str, Any]:
    """Return the fields of a request for what ``--stage`` names; the environment is packed unless it has been."""
    if not args.stage:
        return {}
    items = args.stage.split(",")
    files = [item for item in items if item not in ("env", "data", "container")]
    if "data" in items:
        if args.runner or args.config.endswith(PROGRAM):
            raise UsageError(
                f"--stage data: {args.config} has no settings that name data files; name them in its place"
            )
        files = [*data_files(load_settings(args.config, _settings(args)).data), *files]
    found: dict[str, Any] = {"stage_data": check_files(tuple(dict.fromkeys(files)))}
    if "container" in items:
        check_files((image,) if image not in ("", "none") else ())
        found["stage_container"] = True
    if "env" in items:
        if not venv:
            raise UsageError("--stage env: the job has no virtual environment of its own (--venv); remove env")
        from tqdm import tqdm

        from hpctrain.stage.archive import pack, starter_of
        from hpctrain.stage.environment import find_environment
        from hpctrain.stage.starter import write_starter

        environment = find_environment(Path(venv))
        with tqdm(desc="packing", unit="B", unit_scale=True, leave=False, disable=None) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            archive = pack(environment, Path(os.path.expanduser(PACKED)), progress)
        lacks = write_starter(environment, archive)  # without it, the script calls hpctrain stage
        found |= {"stage_env": str(archive), "stage_program": "" if lacks else str(starter_of(archive))}
    return found


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


# Options of a job, which hpctrain submit has too ----------------------------------------------------------------------


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
