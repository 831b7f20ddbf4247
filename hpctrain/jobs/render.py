"""Rendering of job scripts: a request and a site's profile in, text out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.jobs import pbs, slurm
from hpctrain.jobs.check import problems
from hpctrain.jobs.command import launcher, preflight, program
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.request import FOLDER, Request
from hpctrain.jobs.template import Raw, Value, fill, join, read_template

_PLACES = {"slurm": slurm.places, "pbs": pbs.places}
ENDINGS = {"slurm": "sbatch", "pbs": "pbs"}


def render(request: Request, profile: Profile) -> str:
    """Return the job's script; raises ``UsageError`` if the scheduler would misinterpret it."""
    request = with_defaults(request, profile)
    values = {**_shared(request, profile), **_PLACES[profile.scheduler](request, profile)}
    script = fill(read_template(profile.scheduler, request.template), values)
    if found := problems(script):
        raise UsageError(f"the script would be invalid: {'; '.join(found)}")
    return script


def with_defaults(request: Request, profile: Profile) -> Request:
    """Return a request whose empty fields are filled from the profile."""
    names = ("partition", "qos", "constraint", "container")
    filled: dict[str, Any] = {name: getattr(request, name) or getattr(profile, name) for name in names}
    if filled["container"] == "none":
        filled["container"] = ""
    return replace(request, **filled)


def script_path(request: Request, profile: Profile) -> str:
    """Return the path of the script; a job that resubmits itself finds it there."""
    return str(PurePosixPath(request.folder) / f"job.{ENDINGS[profile.scheduler]}")


def _shared(request: Request, profile: Profile) -> dict[str, Value]:
    """Return the values of the placeholders in both schedulers' templates."""
    environment = {**profile.environment, **request.environment}
    if profile.interface:
        environment.setdefault("NCCL_SOCKET_IFNAME", profile.interface)
    if request.is_program:
        environment[FOLDER] = request.folder
    return {
        "shell": profile.shell,
        "config": request.config,
        "folder": request.folder,
        "script": script_path(request, profile),
        "name": request.name,
        "account": request.account or None,
        "partition": request.partition or None,
        "qos": request.qos or None,
        "nodes": request.nodes,
        "ranks_per_node": request.ranks_per_node,
        "cpus_per_rank": request.cpus_per_rank,
        "directives": (*profile.directives, *request.directives) or None,
        "purge": "purge" if profile.purge else None,
        "modules": (*profile.modules, *request.modules) or None,
        "venv": request.venv or None,
        "environment": tuple(f"{name}={value}" for name, value in environment.items()) or None,
        "restarts": request.restarts,
        "retries": request.retries,
        "cases": _cases(request) or None,
        "launcher": launcher(request, profile),
        "preflight": preflight(request, profile),
        "program": program(request, profile),
    }


def _cases(request: Request) -> tuple[Raw, ...]:
    """Return one line of shell per task of an array, with its settings."""
    lines = []
    for number, settings in enumerate(request.sweep):
        words = join([word for text in settings for word in ("--set", text)])
        lines.append(Raw(f"{number}) settings=({words}) ;;"))
    return tuple(lines)
