"""Checks of environment variables that change a job without a trace in its script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpctrain.doctor.findings import Finding, note, warning

# Inputs of srun in its environment; outside of a job they were set by the user or by a module.
_SRUN = (
    "SLURM_ACCOUNT SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_DISTRIBUTION SLURM_EXCLUSIVE SLURM_EXPORT_ENV SLURM_HINT "
    "SLURM_MEM_BIND SLURM_NNODES SLURM_NPROCS SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_OVERLAP SLURM_PARTITION "
    "SLURM_QOS SLURM_TIMELIMIT"
).split()
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PINNING = ("OMP_PLACES", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
_SLOWS = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel of the GPU",
    "HPCTRAIN_CHECK": "ranks compare every collective before they begin it",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor on the GPU is allocated anew",
}


def check(environ: Mapping[str, str], cores: int) -> Iterator[Finding]:
    """Yield the findings on the environment of a node with ``cores`` cores."""
    yield from _scheduler(environ)
    yield from _threads(environ, cores)
    if preloaded := environ.get("LD_PRELOAD"):
        yield warning(
            "variables",
            f"LD_PRELOAD={preloaded}",
            "it is loaded into every program of the job, and may replace its MPI, its malloc or its input and output",
            "unset LD_PRELOAD unless you know what it is for",
        )
    for name, why in _SLOWS.items():
        if environ.get(name, "0") not in ("", "0"):
            yield note("variables", f"{name}={environ[name]}", f"{why}: for finding faults", f"unset {name}")


def _scheduler(environ: Mapping[str, str]) -> Iterator[Finding]:
    overriding = sorted(name for name in environ if name.startswith("SBATCH_"))
    if overriding:
        yield warning(
            "variables",
            ", ".join(f"{name}={environ[name]}" for name in overriding),
            "these override the directives of a script",
            f"unset {' '.join(overriding)}; hpctrain submit removes them",
        )
    asked = [name for name in _SRUN if name in environ and "SLURM_JOB_ID" not in environ]
    if asked:
        yield warning(
            "variables",
            f"{', '.join(f'{name}={environ[name]}' for name in asked)}, outside of any job",
            "srun uses these as defaults of its options",
            f"unset {' '.join(asked)}",
        )


def _threads(environ: Mapping[str, str], cores: int) -> Iterator[Finding]:
    for name in _THREADS:
        text = environ.get(name, "").partition(",")[0].strip()
        if not text:
            continue
        if not text.isdecimal() or int(text) == 0:
            yield warning(
                "variables", f"{name}={text} is not a number of threads", "libraries ignore it", f"unset {name}"
            )
        elif int(text) > cores:
            yield warning(
                "variables",
                f"{name}={text} on a node of {cores} core{'s' if cores > 1 else ''}",
                "more threads than cores slow each other down, and every rank starts this many",
                f"unset {name}: each rank then takes its share of the cores that it may use",
            )
    pinned = [name for name in _PINNING if environ.get(name)]
    if pinned:
        yield note(
            "variables",
            ", ".join(f"{name}={environ[name]}" for name in pinned),
            "if the launcher has not bound the ranks, each puts its threads on the same cores",
            "let the launcher bind (srun --cpu-bind=cores), and see the table of hpctrain doctor --preflight",
        )
