"""The request for a job that a command line describes, and its script: for ``hpctrain job`` and ``hpctrain submit``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from hpctrain.cli.main import parser_with
from hpctrain.cli.run import DEFAULT, check_program
from hpctrain.data.settings import data_files
from hpctrain.errors import UsageError
from hpctrain.jobs import profile as profiles
from hpctrain.jobs.modulefile import venv_of
from hpctrain.jobs.profile import Profile, installed_wheel, srun_type, with_tolerance
from hpctrain.jobs.render import MODULE, render
from hpctrain.jobs.request import PROGRAM, Request, combine, node_range, run_folder
from hpctrain.jobs.staging import check_files
from hpctrain.settings import assign, read_toml
from hpctrain.stage.local import PACKED
from hpctrain.train.config import check_node_counts
from hpctrain.train.config import load as load_settings

_LONGEST_NAME = 15  # characters of a job name that every PBS version accepts


def script_of(args: argparse.Namespace) -> tuple[str, Request, Profile]:
    """Return the script that the command line describes, with its request and profile."""
    _take_runner(args)
    profile, _ = profile_of(args)
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


def profile_of(args: argparse.Namespace) -> tuple[Profile, str]:
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
        modules=_modules(args, profile),
        environment=_environment(args.env),
        settings=_settings(args),
        words=tuple(args.words),
        runner=tuple(args.runner),
        directives=tuple(args.directives),
        container_options=_container_options(args, profile),
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
    modules = (*profile.modules, *_modules(args, profile))
    container = args.container or profile.container
    if container not in ("", "none") or any(map(_is_own, modules)):
        return ""
    return sys.prefix if sys.prefix != sys.base_prefix else ""


def _modules(args: argparse.Namespace, profile: Profile) -> tuple[str, ...]:
    """Return the modules to load besides those of the profile.

    If this command comes from a loaded module, the job loads it too; and all modules that are loaded now, if its MPI is
    that of the site.
    """
    given, root = tuple(args.modules), os.environ.get("HPCTRAIN_ROOT")
    names = (*profile.modules, *given)
    container = args.container or profile.container
    if args.venv is not None or container not in ("", "none") or any(map(_is_own, names)):
        return given
    loaded = os.environ.get("LOADEDMODULES", "").split(":")
    if not root or Path(root, "venv") != Path(sys.prefix) or not any(map(_is_own, loaded)):
        return given
    needed = filter(_is_own, loaded) if installed_wheel(sys.prefix) else loaded
    return (*(name for name in needed if name and name not in names), *given)


def _is_own(module: str) -> bool:
    return module.partition("/")[0] == MODULE


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


def _container_options(args: argparse.Namespace, profile: Profile) -> tuple[str, ...]:
    """Return the options of the container program, each with its value."""
    if args.container_options and (args.container or profile.container) in ("", "none"):
        raise UsageError("--container-options: there is no container; name it with --container")
    found: list[str] = []
    try:
        words = shlex.split(args.container_options)
    except ValueError as error:
        raise UsageError(f"--container-options {args.container_options!r}: {error}") from error
    for word in words:
        if found and not word.startswith("-") and " " not in found[-1] and "=" not in found[-1]:
            found[-1] += f" {word}"
        else:
            found.append(word)
    return tuple(found)


def _environment(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise UsageError(f"--env {text[:40]!r}: write it as NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}
