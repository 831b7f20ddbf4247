"""Machine description on which measurements depend: node type, MPI library and software versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from hpctrain._version import __version__
from hpctrain.util.child import python

_CPUINFO = Path("/proc/cpuinfo")
_NAMES = ("model name", "cpu model", "cpu", "Model")  # keys of the processor's name on various architectures
# Runs in a subprocess, because MPI must not start in a process that only needs the library's name.
_ASK_MPI = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI as m; print(m.Get_library_version())"


@dataclass(frozen=True)
class Machine:
    """Type of node and its software; a measurement is valid only on an equal machine."""

    processor: str
    cores: int
    gpu: str  # empty if no GPU is visible
    gpus: int
    mpi: str
    torch: str
    hpctrain: str

    def differences(self, other: Machine) -> list[str]:
        """Return the differences of another machine: ``torch 2.11.0 (here 2.13.0)``."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return [f"{name} {there or 'none'} (here {here or 'none'})" for name, here, there in pairs if here != there]

    def __str__(self) -> str:
        gpus = f", {self.gpus} x {self.gpu}" if self.gpus else ""
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        # Open MPI's version string continues with the builder and the date.
        software = f"{self.mpi.partition(',')[0] or 'no MPI'}, torch {self.torch}, hpctrain {self.hpctrain}"
        return f"{self.processor}, {cores}{gpus}; {software}"


def this_machine(mpi: str) -> Machine:
    """Return the description of this node as seen by this process; ``mpi`` is the name of its MPI library."""
    import torch

    gpus = torch.cuda.device_count()
    return Machine(
        processor=processor(),
        cores=os.cpu_count() or 1,
        gpu=torch.cuda.get_device_name(0) if gpus else "",
        gpus=gpus,
        mpi=mpi,
        torch=str(torch.__version__),
        hpctrain=__version__,
    )


def processor(cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of the processor, or its architecture if the system does not report a name."""
    try:
        pairs = [line.partition(":") for line in cpuinfo.read_text(errors="replace").splitlines()]
    except OSError:
        pairs = []
    found = {name.strip(): " ".join(value.split()) for name, _, value in pairs}
    return next((found[name] for name in _NAMES if found.get(name)), platform.machine() or "unknown")


def mpi_name() -> str:
    """Return the MPI library of this environment without starting MPI; empty if there is none."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None:
        from hpctrain.transport.canary import library_name

        return library_name()
    try:
        done = subprocess.run(python("-c", _ASK_MPI), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines()
    return " ".join(lines[0].strip("\0").split()) if done.returncode == 0 and lines else ""
