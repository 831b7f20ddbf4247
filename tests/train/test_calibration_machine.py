"""Identity of a machine: the properties on which measurements depend, found without starting MPI."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from hpctrain import __version__
from hpctrain.train.calibration import NodeType, mpi_name, processor, this_machine

MACHINE = NodeType("EPYC", 64, "H200", 4, "MPICH 5", "2.13", "0.1")


def test_this_machine_is_described() -> None:
    found = this_machine("Some MPI 1")
    assert (found.mpi, found.torch, found.hpctrain) == ("Some MPI 1", str(torch.__version__), __version__)
    assert found.cores >= 1 and found.gpus == torch.cuda.device_count() and found.processor == processor()


def test_machines_are_compared_and_described() -> None:
    assert MACHINE.differences(MACHINE) == []
    other = replace(MACHINE, gpu="", gpus=0, torch="2.11")
    assert MACHINE.differences(other) == ["gpu none (here H200)", "gpus none (here 4)", "torch 2.11 (here 2.13)"]
    assert str(MACHINE) == "EPYC, 64 cores, 4 x H200; MPICH 5, torch 2.13, hpctrain 0.1"
    assert "; Open MPI v5, torch" in str(replace(other, mpi="Open MPI v5, package: Open MPI user@host"))
    assert str(replace(other, cores=1)) == "EPYC, 1 core; MPICH 5, torch 2.11, hpctrain 0.1"


def test_processor_names_are_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: AMD  EPYC 9654\nflags\t: a b\n")
    assert processor(cpuinfo) == "AMD EPYC 9654"
    cpuinfo.write_text("processor\t: 0\ncpu\t\t: POWER9, altivec\nclock : 1\n")
    assert processor(cpuinfo) == "POWER9, altivec"
    assert processor(tmp_path / "missing") != ""


def test_the_mpi_is_named_without_initializing_it() -> None:
    code = """
import sys
from hpctrain.train.calibration import mpi_name
name = mpi_name()
assert "mpi4py.MPI" not in sys.modules
from mpi4py import MPI
print(name, MPI.Is_initialized() and mpi_name() == name and name in " ".join(MPI.Get_library_version().split()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split()[-1] == "True" and len(done.stdout.split()) > 1


def test_without_mpi_the_name_is_empty() -> None:
    code = "import hpctrain.train.calibration as m; m._ASK_MPI = 'import sys; sys.exit(1)'; print(repr(m.mpi_name()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "''\n"
    assert isinstance(mpi_name(), str)
