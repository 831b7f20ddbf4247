"""Rendering of job scripts: a request and a site's profile in, text out; one function per launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.jobs import directives
from hpctrain.jobs.check import problems
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.request import FOLDER, Request
from hpctrain.jobs.template import SCHEDULERS, Raw, Value, fill, join, read_template

Words = list[str]
MODULE = "hpctrain"  # name of the project's own modulefiles


def launcher(request: Request, profile: Profile) -> Words:
    """Return the launcher and its options."""
    return [*_LAUNCHERS[profile.launcher](request, profile), *_words(profile.launch_options)]


def program(request: Request, profile: Profile) -> Words:
    """Return the command of every rank, in its container if there is one."""
    words = _own_program(request, profile) if request.is_program else _PROGRAMS[request.template](request)
    return _contained(request, profile, words)


def preflight(request: Request, profile: Profile) -> Words | None:
    """Return the command of every rank that measures the nodes first, to find slow nodes; None if not requested."""
    if not request.preflight:
        return None
    folder = Raw('"$folder"')
    found = ["--folder", folder, "--output", Raw(f"{folder}/preflight.json")]
    words = ["hpctrain", "doctor", "--preflight", "--strict", "--seconds", str(request.preflight), *found]
    return _contained(request, profile, words)


def _contained(request: Request, profile: Profile, words: Words) -> Words:
    """Return a command inside the job's container, if there is one."""
    if request.container:
        return [profile.container_program, "exec", *_words(profile.container_options), request.container, *words]
    return words


def _words(options: tuple[str, ...]) -> Words:
    """Return options as separate words: ``--bind-to none`` is split at its blank."""
    return [word for option in options for word in option.split(" ", 1)]


def _srun(request: Request, profile: Profile) -> Words:
    # Without --kill-on-bad-exit the other ranks of MPICH wait if one is killed. Slurm 22.05 to
    # 23.02 do not pass --cpus-per-task from the script's directives on to srun.
    mpi = [f"--mpi={profile.mpi}"] if profile.mpi else []
    gpus = [f"--gpus-per-task={_gpus_per_rank(request)}"] if _by_task(request, profile) else []
    return ["srun", *mpi, "--kill-on-bad-exit=1", f"--cpus-per-task={request.cpus_per_rank}", *gpus]


def _openmpi(request: Request, profile: Profile) -> Words:
    if profile.scheduler == "pbs":
        found = ["--hostfile", Raw('"$PBS_NODEFILE"'), Raw('"${bind[@]}"'), Raw('"${variables[@]}"')]
        return ["mpirun", "-n", str(request.ranks), *found]
    mapping = f"ppr:{request.ranks_per_node}:node:PE={request.cpus_per_rank}"
    return ["mpirun", "-n", str(request.ranks), "--map-by", mapping]


def _hydra(request: Request, profile: Profile) -> Words:
    placed = ["-n", str(request.ranks), "-ppn", str(request.ranks_per_node)]
    binding = [Raw('"${bind[@]}"')] if profile.scheduler == "pbs" else ["-bind-to", f"core:{request.cpus_per_rank}"]
    return ["mpiexec", *placed, *binding]


def _pals(request: Request, profile: Profile) -> Words:
    placed = ["-n", str(request.ranks), "--ppn", str(request.ranks_per_node)]
    return ["mpiexec", *placed, "--depth", str(request.cpus_per_rank), "--cpu-bind", "depth"]


def _by_task(request: Request, profile: Profile) -> bool:
    return profile.gpus == "gpus-per-task" and bool(_gpus_per_rank(request))


def _gpus_per_rank(request: Request) -> int:
    return request.gpus_per_node // request.ranks_per_node


def _train(request: Request) -> Words:
    return ["hpctrain", "train", request.config, *_settings(request)]


def _array(request: Request) -> Words:
    task = [Raw('"${settings[@]}"'), "--set", Raw('"run.folder=$folder"')]
    return ["hpctrain", "train", request.config, *_settings(request), *task]


def _benchmark(request: Request) -> Words:
    seconds = min(300, request.walltime // 2)
    found = f"{request.folder}/calibration.json"
    return ["hpctrain", "bench", "calibrate", "--seconds", str(seconds), "--output", found]


def _own_program(request: Request, profile: Profile) -> Words:
    """Return the command that runs the user's own program, with the Python that has this package.

    The project's own module provides that Python under a name of its own, next to the user's
    Python.
    """
    loaded = any(name.partition("/")[0] == MODULE for name in (*profile.modules, *request.modules))
    return [f"{MODULE}-python" if loaded and not request.container else "python", request.config, *request.words]


def _settings(request: Request) -> Words:
    """Return the --set options of the program; as jobs are requeued, run.resume is auto unless the user sets it."""
    resume = [] if any(text.startswith("run.resume=") for text in request.settings) else ["run.resume=auto"]
    return [word for text in (*resume, *request.settings) for word in ("--set", text)]


_LAUNCHERS: dict[str, Callable[[Request, Profile], Words]] = {
    "srun": _srun,
    "openmpi": _openmpi,
    "hydra": _hydra,
    "pals": _pals,
}
_PROGRAMS: dict[str, Callable[[Request], Words]] = {"train": _train, "array": _array, "benchmark": _benchmark}


# Rendering of job scripts: a request and a site's profile in, text out ------------------------------------------------


_VALUES = {"slurm": directives.slurm_values, "pbs": directives.pbs_values}


def render(request: Request, profile: Profile) -> str:
    """Return the job's script; raises ``UsageError`` if the scheduler would misinterpret it."""
    request = with_defaults(request, profile)
    values = {**_shared(request, profile), **_VALUES[profile.scheduler](request, profile)}
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
    return str(PurePosixPath(request.folder) / f"job.{SCHEDULERS[profile.scheduler].ending}")


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
