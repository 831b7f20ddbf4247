"""Values of the PBS templates for a job request (qsub(1B), pbs_resources(7B))."""

from __future__ import annotations

from hpctrain.errors import UsageError
from hpctrain.jobs.fields import clock
from hpctrain.jobs.pbs_setup import setup
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.request import Request
from hpctrain.jobs.template import Value

_ONLY_SLURM = ("reservation", "constraint", "exclude", "qos")


def places(request: Request, profile: Profile) -> dict[str, Value]:
    """Return the values of the placeholders that only PBS templates have."""
    for name in _ONLY_SLURM:
        if getattr(request, name):
            raise UsageError(f"{name} = {getattr(request, name)!r}: PBS does not support it; see directives and select")
    return {
        "time": clock(request.walltime),
        "walltime": request.walltime,
        "margin": request.margin,
        "select": _select(request, profile),
        "place": None if _says(request, profile, "-l", "place=") else profile.place,
        "output": None if _says(request, profile, "-o") else f"{request.folder}/",
        "setup": setup(request, profile) or None,
        "array": _array(request) if request.sweep else None,
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


def _says(request: Request, profile: Profile, option: str, value: str = "") -> bool:
    """Return whether an additional directive has this option, so that the template's own must be omitted."""
    given = (*profile.directives, *request.directives)
    return any(text.startswith(option) and value in text for text in given)


def _memory(text: str) -> str:
    """Return an amount of memory with PBS's units; a plain number is in megabytes, as in Slurm."""
    if text == "0":
        raise UsageError("memory = '0': PBS has no value for all the memory of a node, give an amount such as 200G")
    return text.lower() + "b" if text[-1].isalpha() else f"{text}mb"


def _array(request: Request) -> str:
    last = len(request.sweep) - 1
    if request.at_once and request.restarts:
        raise UsageError(
            f"at_once = {request.at_once}: tasks of a PBS array that come back are jobs of their own, which its limit "
            "does not count; allowed with restarts = 0; remove one of them"
        )
    if not last:
        raise UsageError("sweep has 1 task: an array of PBS has at least 2")
    return f"0-{last}" + (f"%{request.at_once}" if request.at_once else "")
