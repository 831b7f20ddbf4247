"""Values of the Slurm and PBS templates for a job request (sbatch(1), qsub(1B), pbs_resources(7B))."""

from __future__ import annotations

from hpctrain.errors import UsageError
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.request import Request
from hpctrain.jobs.template import Raw, Value, clock, join


def slurm_values(request: Request, profile: Profile) -> dict[str, Value]:
    """Return the values of the placeholders that only Slurm templates have."""
    ending = "%A_%a" if request.sweep else "%j"
    return {
        "time": clock(request.walltime),
        "reservation": request.reservation or None,
        "constraint": request.constraint or None,
        "exclude": request.exclude or None,
        "memory": request.memory or None,
        "gpus": _gpus(request, profile),
        # With srun the signal goes to the job steps; with mpirun or mpiexec it goes to the script
        # (B:), which forwards it.
        "signal": f"{'' if profile.launcher == 'srun' else 'B:'}USR1@{request.margin}",
        "array": _slurm_array(request) if request.sweep else None,
        "output": f"{request.folder}/%x-{ending}.out",
    }


def _gpus(request: Request, profile: Profile) -> str | None:
    number = request.gpus_per_node
    if not number or profile.gpus == "none":
        return None
    kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
    if profile.gpus == "gres":
        return f"--gres=gpu:{kind}{number}"
    if profile.gpus == "gpus-per-node":
        return f"--gpus-per-node={kind}{number}"
    if number < request.ranks_per_node:
        raise UsageError(
            f"gpus_per_node = {number}: this profile asks for GPUs by rank, and there are {request.ranks_per_node} "
            "ranks a node"
        )
    return f"--gpus-per-task={kind}{number // request.ranks_per_node}"


def _slurm_array(request: Request) -> str:
    last = len(request.sweep) - 1
    return f"0-{last}" + (f"%{request.at_once}" if request.at_once else "")


# Lines of a PBS script that prepare the launcher ----------------------------------------------------------------------


# Variables that belong to one node or to one shell; Open MPI exports its own parameters itself.
_NPROC = "env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc"  # nproc obeys these variables
_NOT_EXPORTED = "HOSTNAME|PBS_NODENUM|PBS_TASKNUM|PWD|OLDPWD|SHLVL|_|(OMPI|PMIX|PRTE)_MCA_.*"


def setup(request: Request, profile: Profile) -> tuple[Raw, ...]:
    """Return the lines; they set ``bind`` and ``variables``, which the launcher's command uses."""
    return tuple(map(Raw, (*_binding(request, profile), *_other_nodes(request, profile), *_open_mpi(request, profile))))


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
    if request.nodes == 1 or not binds(profile):
        return []
    variable = {
        "hydra": "HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC",
        "openmpi": "PRTE_MCA_plm_ssh_agent",
    }[profile.launcher]
    asked = {"hydra": "HYDRA_LAUNCHER", "openmpi": "PRTE_MCA_plm_ssh_agent"}[profile.launcher]
    return [
        "# Ranks on other nodes start by PBS if it can, else by ssh: many sites have no ssh between their nodes.",
        f'if [ -z "${asked}" ] && tmrsh=$(command -v pbs_tmrsh); then',
        '    agent=$(cd "$folder" && pwd)/tmrsh',
        '    cat >"$agent.new" <<END && chmod 755 "$agent.new" && mv "$agent.new" "$agent"',
        "#!/bin/sh",
        r"host=\$1",
        "shift",
        r'exec $tmrsh "\$host" /bin/sh -c "umask $(umask); \$*"',
        "END",
        f"    export {variable}=$agent",
        "fi",
    ]


def _open_mpi(request: Request, profile: Profile) -> list[str]:
    if profile.scheduler != "pbs" or profile.launcher != "openmpi":
        return []
    if request.nodes == 1:
        return [
            "# mpirun of Open MPI 5.0.11 crashes on what PBS says of a single node; the host file says the same.",
            "export PRTE_MCA_ras=^pbs",
            "variables=()",
        ]
    return [
        "# mpirun hands on no variable to other nodes, PATH neither, unless it is named.",
        "variables=()",
        f"for name in $(compgen -e | grep -vxE '{_NOT_EXPORTED}'); do" '  variables+=(-x "$name"); done',
    ]


# Values of the PBS templates for a job request (qsub(1B), pbs_resources(7B)) ------------------------------------------


_ONLY_SLURM = ("reservation", "constraint", "exclude", "qos")


def pbs_values(request: Request, profile: Profile) -> dict[str, Value]:
    """Return the values of the placeholders that only PBS templates have."""
    for name in _ONLY_SLURM:
        if getattr(request, name):
            raise UsageError(f"{name} = {getattr(request, name)!r}: PBS does not support it; see directives and select")
    return {
        "time": clock(request.walltime),
        "walltime": request.walltime,
        "margin": request.margin,
        "select": _select(request, profile),
        "place": None if _has_directive(request, profile, "-l", "place=") else profile.place,
        "output": None if _has_directive(request, profile, "-o") else f"{request.folder}/",
        "setup": setup(request, profile) or None,
        "array": _pbs_array(request) if request.sweep else None,
    }


def _select(request: Request, profile: Profile) -> str:
    """Return the chunks, one per node; ncpus, mpiprocs and ompthreads are allowed only in a chunk."""
    parts = [str(request.nodes)]
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
    last = len(request.sweep) - 1
    if request.at_once and request.restarts:
        raise UsageError(
            f"at_once = {request.at_once}: tasks of a PBS array that come back are jobs of their own, which its limit "
            "does not count; allowed with restarts = 0; remove one of them"
        )
    if not last:
        raise UsageError("sweep has 1 task: an array of PBS has at least 2")
    return f"0-{last}" + (f"%{request.at_once}" if request.at_once else "")
