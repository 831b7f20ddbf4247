"""Checks of the environment of jobs: its Python, loaded modules, and variables that change a job without a trace."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpctrain._version import __version__
from hpctrain.doctor.findings import Finding, error, note, ok, warning

_OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Interpreter:
    """Properties of this process's Python."""

    version: tuple[int, int, int]
    prefix: str
    venv: bool
    package: str  # folder of hpctrain
    user_site: str  # ~/.local/lib/... if it is in the path, else empty


def read_interpreter() -> Interpreter:
    import site
    from pathlib import Path

    user = site.getusersitepackages()
    return Interpreter(
        version=sys.version_info[:3],
        prefix=sys.prefix,
        venv=sys.prefix != sys.base_prefix,
        package=str(Path(__file__).resolve().parents[2]),
        user_site=user if user in sys.path else "",
    )


def check_interpreter(python: Interpreter, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on a Python and on the variables that affect it."""
    text = ".".join(map(str, python.version))
    if python.version < _OLDEST_PYTHON:
        yield error("Python", text, "hpctrain needs 3.11 or newer", "load a newer Python, and make a new environment")
    else:
        yield ok("Python", f"{text} in {python.prefix}")
    yield ok("hpctrain", f"{__version__} in {python.package}, on {platform.machine()}")
    if not python.venv and "CONDA_PREFIX" not in environ:
        yield note(
            "Python",
            "no virtual environment is active",
            "packages of the system or of ~/.local are used, which differ from node to node and from day to day",
            "python3 -m venv FOLDER, and install hpctrain in there",
        )
    yield from _leaks(python, environ)


def _leaks(python: Interpreter, environ: Mapping[str, str]) -> Iterator[Finding]:
    if home := environ.get("PYTHONHOME"):
        yield error(
            "Python",
            f"PYTHONHOME={home}",
            "every Python, of any version, loads its standard library from there",
            "unset PYTHONHOME, and unload the module that sets it",
        )
    if path := environ.get("PYTHONPATH"):
        yield warning(
            "Python",
            f"PYTHONPATH={path}",
            f"packages there come before those of {python.prefix}: a torch or numpy of a module, built for another "
            "Python, is taken for yours",
            "unset PYTHONPATH in the job, or load the module before the environment and install nothing twice",
        )
    if python.user_site:
        yield note(
            "Python",
            f"packages in {python.user_site} are in use",
            "they take precedence over the packages of modules and containers",
            "export PYTHONNOUSERSITE=1",
        )


# Checks of the environment modules of this shell ----------------------------------------------------------------------


# Modules with packages that a user's own environment also contains.
_RIVALS = ("pytorch", "torch", "tensorflow", "horovod", "anaconda", "miniconda", "mambaforge")


def check_modules(environ: Mapping[str, str], venv: bool) -> Iterator[Finding]:
    """Yield the module system, and loaded modules that may conflict; ``venv``: a virtual environment is active."""
    system = _system(environ)
    loaded = [name for name in environ.get("LOADEDMODULES", "").split(":") if name]
    if not system:
        yield ok("modules", "no environment modules here")
        return
    yield ok("modules", f"{system}; loaded: {', '.join(loaded) or 'none'}")
    rivals = [name for name in loaded if name.lower().partition("/")[0].startswith(_RIVALS)]
    if rivals and venv:
        yield note(
            "modules",
            f"{', '.join(rivals)} loaded beside a virtual environment",
            "its packages may take precedence over those of the environment",
            f"module unload {' '.join(rivals)}, or do without the environment",
        )


def _system(environ: Mapping[str, str]) -> str:
    if version := environ.get("LMOD_VERSION"):
        return f"Lmod {version}"
    if environ.get("MODULES_CMD") or environ.get("MODULESHOME"):
        return f"Environment Modules {environ.get('MODULES_VERSION', '')}".strip()
    return ""


# Checks of environment variables that change a job without a trace in its script --------------------------------------


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


def check_variables(environ: Mapping[str, str], cores: int) -> Iterator[Finding]:
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
