"""Advice with the options of the scheduler in use, which differ between Slurm and PBS."""

from __future__ import annotations

# Advice by scheduler; without a job the advice is Slurm's.
_WORDS = {
    "memory": {"slurm": "--mem=SIZE in the job's script", "pbs": "mem=SIZE in the job's select (hpctrain: --memory)"},
    "cores": {
        "slurm": "--cpus-per-task=N on the line of srun, for N cores per rank",
        "pbs": "ncpus in the job's select (hpctrain: --cpus-per-rank), for N cores per rank",
    },
    "more cores": {
        "slurm": "--cpus-per-task=N on the line of srun, too",
        "pbs": "ncpus in the job's select (hpctrain: --cpus-per-rank)",
    },
    "GPUs": {"slurm": "--gpus-per-node=N", "pbs": "ngpus=N in the job's select (hpctrain: --gpus-per-node)"},
    "leave out": {
        "slurm": "submit again with --exclude={}",
        "pbs": "report them to the site, which can take them offline (pbsnodes -o); PBS has no option to exclude nodes",
    },
}


def advice(what: str, scheduler: str | None, *values: str) -> str:
    """Return the advice on a topic for this scheduler; Slurm's outside of a job."""
    words = _WORDS[what]
    return words.get(scheduler or "slurm", words["slurm"]).format(*values)
