"""Lines of a PBS script that prepare the launcher: core binding, remote start, and the environment of other nodes."""

from __future__ import annotations

from hpctrain.jobs.profile import Profile
from hpctrain.jobs.request import Request
from hpctrain.jobs.template import Raw, join

# Variables that belong to one node or to one shell; Open MPI exports its own parameters itself.
_NPROC = "env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc"  # nproc obeys these variables
_OWN = "HOSTNAME|PBS_NODENUM|PBS_TASKNUM|PWD|OLDPWD|SHLVL|_|(OMPI|PMIX|PRTE)_MCA_.*"


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
        f"for name in $(compgen -e | grep -vxE '{_OWN}'); do" '  variables+=(-x "$name"); done',
    ]
