"""Values of the Slurm templates for a job request (sbatch(1))."""

from __future__ import annotations

from hpctrain.errors import UsageError
from hpctrain.jobs.fields import clock
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.request import Request
from hpctrain.jobs.template import Value


def places(request: Request, profile: Profile) -> dict[str, Value]:
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
        "array": _array(request) if request.sweep else None,
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


def _array(request: Request) -> str:
    last = len(request.sweep) - 1
    return f"0-{last}" + (f"%{request.at_once}" if request.at_once else "")
