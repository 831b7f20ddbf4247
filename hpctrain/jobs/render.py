"""Rendering of job scripts: a request and a site's profile in, text out; one function per launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from hpctrain.cluster.resources import GPUS
from hpctrain.errors import UsageError
from hpctrain.jobs.check import problems
from hpctrain.jobs.profile import Profile, option_words
from hpctrain.jobs.request import FOLDER, NEWEST_FILE, Request, granted_nodes, task_cases
from hpctrain.jobs.spares import NODE_FILE, on_living_nodes, pbs_spare_values, spare_values
from hpctrain.jobs.staging import in_container, one_per_node, stage_values, staged_program
from hpctrain.jobs.template import SCHEDULERS, Raw, Value, clock, fill, join, read_template

Words = list[str]
MODULE = "hpctrain"  # name of the project's own modulefiles


def program(request: Request, profile: Profile) -> Words:
    """Return the command of every rank, in its container if there is one."""
    if request.is_program:
        return in_container(request, profile, _own_program(request, profile))
    return in_container(request, profile, _benchmark(request) if request.template == "benchmark" else _train(request))


def preflight(request: Request, profile: Profile) -> Words | None:
    """Return the command of every rank that measures the nodes first, to find slow nodes; None if not requested."""
    if not request.preflight:
        return None
    folder = Raw('"$folder"')
    found = ["--folder", folder, "--output", Raw(f"{folder}/preflight.json")]
    words = ["hpctrain", "doctor", "--preflight", "--strict", "--seconds", str(request.preflight), *found]
    return in_container(request, profile, words)


def _srun(request: Request, profile: Profile) -> Words:
    # Without --kill-on-bad-exit the other ranks of MPICH wait if one is killed. Slurm 22.05 to
    # 23.02 do not pass --cpus-per-task from the script's directives on to srun.
    mpi = [f"--mpi={profile.mpi}"] if profile.mpi else []
    each = request.gpus_per_node // request.ranks_per_node
    gpus = [f"--gpus-per-task={each}"] if profile.gpus == "gpus-per-task" and each else []
    # Options of srun take precedence over SLURM_NTASKS and similar variables.
    placed = [Raw('--nodes="$nodes"'), Raw('--ntasks="$ranks"'), f"--ntasks-per-node={request.ranks_per_node}"]
    counts = placed if request.most_nodes else on_living_nodes(request, profile)
    return ["srun", *mpi, "--kill-on-bad-exit=1", *counts, f"--cpus-per-task={request.cpus_per_rank}", *gpus]


def _openmpi(request: Request, profile: Profile) -> Words:
    if profile.scheduler == "pbs":
        found = ["--hostfile", Raw('"$PBS_NODEFILE"'), Raw('"${bind[@]}"'), Raw('"${variables[@]}"')]
        return ["mpirun", "-n", _ranks(request), *found]
    mapping = f"ppr:{request.ranks_per_node}:node:PE={request.cpus_per_rank}"
    return ["mpirun", "-n", _ranks(request), *on_living_nodes(request, profile), "--map-by", mapping]


def _hydra(request: Request, profile: Profile) -> Words:
    placed = ["-n", _ranks(request), "-ppn", str(request.ranks_per_node)]
    binding = [Raw('"${bind[@]}"')] if profile.scheduler == "pbs" else ["-bind-to", f"core:{request.cpus_per_rank}"]
    return ["mpiexec", *placed, *on_living_nodes(request, profile), *binding]


def _pals(request: Request, profile: Profile) -> Words:
    placed = ["-n", _ranks(request), "--ppn", str(request.ranks_per_node)]
    return ["mpiexec", *placed, "--depth", str(request.cpus_per_rank), "--cpu-bind", "depth"]


def _ranks(request: Request) -> str:
    return Raw('"$ranks"') if request.most_nodes else str(request.ranks)


def _train(request: Request) -> Words:
    task = [Raw('"${settings[@]}"'), "--set", Raw('"run.folder=$folder"')] if request.sweep else []
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
    if request.runner:
        return [MODULE, *request.runner, request.config, *request.words]
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


# Values of the Slurm templates for a job request (sbatch(1)) ----------------------------------------------------------


def slurm_values(request: Request, profile: Profile) -> dict[str, Value]:
    """Return the values of the placeholders that only Slurm templates have."""
    ending = "%A_%a" if request.sweep else "%j"
    fixed = not request.most_nodes
    return {
        **spare_values(request, profile),
        # A range requests cores and no tasks: Slurm grants at most as many nodes as the smallest number
        # of nodes has tasks (2-3 with one task per node is 2), and a requeued job waits for as many
        # tasks as its last start had. With --mincpus alone, every start gets what is free (Slurm 22.05).
        "ntasks_per_node": request.ranks_per_node if fixed else None,
        "cpus_per_task": request.cpus_per_rank if fixed else None,
        "mincpus": None if fixed else request.ranks_per_node * request.cpus_per_rank,
        "granted": None if fixed else granted_nodes(request),
        "time": clock(request.walltime),
        "reservation": request.reservation or None,
        "constraint": request.constraint or None,
        "exclude": request.exclude or None,
        "memory": request.memory or None,
        "gpus": _gpus(request, profile),
        # With srun the signal goes to the job steps; with mpirun or mpiexec it goes to the script
        # (B:), which forwards it.
        "signal": f"{'' if profile.launcher == 'srun' else 'B:'}USR1@{request.margin}",
        "array": request.array if request.sweep else None,
        "output": f"{request.folder}/%x-{ending}.out",
    }


def _gpus(request: Request, profile: Profile) -> str | None:
    number = request.gpus_per_node
    if not number or profile.gpus == "none":
        return None
    kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
    if profile.gpus == "gres":
        return f"--gres=gpu:{kind}{number}"
    if profile.gpus == "gpus-per-node" or request.most_nodes and number >= request.ranks_per_node:
        return f"--gpus-per-node={kind}{number}"  # a range of nodes has no number of tasks
    if number < request.ranks_per_node:
        raise UsageError(
            f"gpus_per_node = {number}: this profile asks for GPUs by rank, and there are {request.ranks_per_node} "
            "ranks a node"
        )
    return f"--gpus-per-task={kind}{number // request.ranks_per_node}"


# Lines of a PBS script that prepare the launcher ----------------------------------------------------------------------


# Variables that belong to one node or to one shell; Open MPI exports its own parameters itself.
_NPROC = "env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc"  # nproc obeys these variables
_NOT_EXPORTED = "HOSTNAME|PBS_NODENUM|PBS_TASKNUM|PWD|OLDPWD|SHLVL|_|(OMPI|PMIX|PRTE)_MCA_.*"


def binds(profile: Profile) -> bool:
    """Return whether the launcher's command takes its binding options from ``bind``."""
    return profile.scheduler == "pbs" and profile.launcher in ("hydra", "openmpi")


def _binding(request: Request, profile: Profile) -> list[str]:
    """Return the lines that decide whether to bind.

    OpenPBS without its cgroups hook does not confine a job to its cores, and launchers bind from
    the first core on. Jobs that share a node would therefore share its first cores, and leave
    others idle.
    """
    if not binds(profile):
        return []
    cores = request.ranks_per_node * request.cpus_per_rank
    if profile.launcher == "hydra":
        bound, free = ["-bind-to", f"core:{request.cpus_per_rank}"], ["-bind-to", "none"]
    else:
        place = f"ppr:{request.ranks_per_node}:node"
        bound = ["--map-by", f"{place}:PE={request.cpus_per_rank}", "--bind-to", "core"]
        free = ["--map-by", place, "--bind-to", "none"]
    lines = [f"bind=({join(bound)})"]
    if profile.chunks == "cpus" and "excl" not in _place(request, profile):
        lines += [
            "# Jobs that share a node would bind to its same first cores: bind only if all cores here are this job's.",
            f'if [ "$({_NPROC})" -gt {cores} ]; then',
            f"    bind=({join(free)})",
            "fi",
        ]
    return lines


def _place(request: Request, profile: Profile) -> str:
    given = [text for text in (*profile.directives, *request.directives) if "place=" in text]
    return " ".join([profile.place, *given])


def _other_nodes(request: Request, profile: Profile) -> list[str]:
    """Return the lines that let MPICH and Open MPI start ranks on other nodes through PBS's task manager.

    Many sites have no ssh between nodes, and PBS kills and accounts only processes that it has
    started itself. ``pbs_tmrsh`` does not accept shell words, but MPICH and Open MPI send some; the
    lines write a wrapper script.
    """
    if request.nodes + request.spares == 1 or not binds(profile):
        return []
    asked, variable = {
        "hydra": ("HYDRA_LAUNCHER", "HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC"),
        "openmpi": ("PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm_ssh_agent"),
    }[profile.launcher]
    return [
        "# Ranks on other nodes start by PBS if it can, else by ssh: many sites have no ssh between their nodes.",
        f'if [ -z "${asked}" ] && tmrsh=$(command -v pbs_tmrsh); then',
        '    agent=$(cd "$folder" && pwd)/tmrsh',
        '    cat >"$agent.new" <<END && chmod 755 "$agent.new" && mv "$agent.new" "$agent"',
        "#!/bin/sh",
        r"host=\$1",
        "shift",
        *([rf"export PBS_NODEFILE=\${NODE_FILE} # pbs_tmrsh numbers nodes by its lines"] if request.spares else []),
        r'exec $tmrsh "\$host" /bin/sh -c "umask $(umask); \$*"',
        "END",
        f"    export {variable}=$agent",
        "fi",
    ]


def _open_mpi(request: Request, profile: Profile) -> list[str]:
    if profile.scheduler != "pbs" or profile.launcher != "openmpi":
        return []
    found = ["variables=()"]
    if request.nodes == 1:
        found.append("# mpirun of Open MPI 5.0.11 crashes on what PBS says of one node; the host file says the same.")
        found.append("export PRTE_MCA_ras=^pbs")
    if request.nodes + request.spares > 1:
        found += [
            "# mpirun hands on no variable to other nodes, PATH neither, unless it is named.",
            f"for name in $(compgen -e | grep -vxE '{_NOT_EXPORTED}'); do" '  variables+=(-x "$name"); done',
        ]
    return found


# Values of the PBS templates for a job request (qsub(1B), pbs_resources(7B)) ------------------------------------------


_ONLY_SLURM = ("reservation", "constraint", "exclude", "qos")


def pbs_values(request: Request, profile: Profile) -> dict[str, Value]:
    """Return the values of the placeholders that only PBS templates have."""
    if request.most_nodes:
        raise UsageError(
            f"nodes = {request.nodes_text}: PBS has no range of nodes, select asks for a fixed number; allowed is one "
            f"number; submit with --nodes {request.nodes}"
        )
    for name in _ONLY_SLURM:
        if getattr(request, name):
            raise UsageError(f"{name} = {getattr(request, name)!r}: PBS does not support it; see directives and select")
    setup = (*_binding(request, profile), *_other_nodes(request, profile), *_open_mpi(request, profile))
    return {
        **pbs_spare_values(request, profile),
        "time": clock(request.walltime),
        "walltime": request.walltime,
        "margin": request.margin,
        "select": _select(request, profile),
        "place": None if _has_directive(request, profile, "-l", "place=") else profile.place,
        "output": None if _has_directive(request, profile, "-o") else f"{request.folder}/",
        # These lines set ``bind`` and ``variables``, which the launcher's command uses.
        "setup": tuple(map(Raw, setup)) or None,
        "array": _pbs_array(request) if request.sweep else None,
    }


def _select(request: Request, profile: Profile) -> str:
    """Return the chunks, one per node; ncpus, mpiprocs and ompthreads are allowed only in a chunk."""
    parts = [str(request.nodes + request.spares)]
    if profile.chunks == "cpus":
        parts += [
            f"ncpus={request.ranks_per_node * request.cpus_per_rank}",
            f"mpiprocs={request.ranks_per_node}",
            f"ompthreads={request.cpus_per_rank}",
        ]
    if profile.gpus == "ngpus" and request.gpus_per_node:
        parts.append(f"ngpus={request.gpus_per_node}")
    if request.memory:
        parts.append(f"mem={_memory(request.memory)}")
    return ":".join([*parts, *profile.select])


def _has_directive(request: Request, profile: Profile, option: str, value: str = "") -> bool:
    """Return whether an additional directive has this option, so that the template's own must be omitted."""
    given = (*profile.directives, *request.directives)
    return any(text.startswith(option) and value in text for text in given)


def _memory(text: str) -> str:
    """Return an amount of memory with PBS's units; a plain number is in megabytes, as in Slurm."""
    if text == "0":
        raise UsageError("memory = '0': PBS has no value for all the memory of a node, give an amount such as 200G")
    return text.lower() + "b" if text[-1].isalpha() else f"{text}mb"


def _pbs_array(request: Request) -> str:
    if request.at_once and request.restarts:
        raise UsageError(
            f"at_once = {request.at_once}: tasks of a PBS array that come back are jobs of their own, which its limit "
            "does not count; allowed with restarts = 0; remove one of them"
        )
    if len(request.sweep) == 1:
        raise UsageError("sweep has 1 task: an array of PBS has at least 2")
    return request.array


# Rendering ------------------------------------------------------------------------------------------------------------


# A run whose ranks have been killed leaves its lock. Open MPI's launcher may exit with code 0 then.
_ALL_KILLED = Raw('if [ "$code" -eq 0 ] && [ -e "$folder/lock.json" ]; then code=137; fi # all ranks were killed')
_VALUES = {"slurm": slurm_values, "pbs": pbs_values}


def render(request: Request, profile: Profile) -> str:
    """Return the job's script; raises ``UsageError`` if the scheduler would misinterpret it."""
    request = with_defaults(request, profile)
    profile.check_masks(request.ranks_per_node, request.cpus_per_rank)
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
    if request.gpus_per_node:
        environment[GPUS] = str(request.gpus_per_node)
    return {
        "shell": profile.shell,
        "config": request.config,
        "folder": request.folder,
        "script": script_path(request, profile),
        "name": request.name,
        "account": request.account or None,
        "partition": request.partition or None,
        "qos": request.qos or None,
        "cpus_per_rank": request.cpus_per_rank,
        "directives": (*profile.directives, *request.directives) or None,
        "purge": "purge" if profile.purge else None,
        "modules": (*profile.modules, *request.modules) or None,
        "venv": request.venv or None,
        "environment": tuple(f"{name}={value}" for name, value in environment.items()) or None,
        "restarts": request.restarts,
        "retries": request.retries,
        "newest_file": NEWEST_FILE if request.runner else None,
        "otherwise": Raw("newest_file || echo nothing" if request.runner else "echo nothing"),
        "cases": task_cases(request.sweep) or None,
        "launcher": _launcher(request, profile),
        "preflight": preflight(request, profile),
        "all_killed": _ALL_KILLED if profile.launcher == "openmpi" else None,
        "program": staged_program(request, profile, program(request, profile)),
        **stage_values(request, profile, _launcher(one_per_node(request), profile)),
    }


def _launcher(request: Request, profile: Profile) -> Words:
    return [*_LAUNCHERS[profile.launcher](request, profile), *option_words(profile.launch_options)]
