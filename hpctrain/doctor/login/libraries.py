"""Checks of libraries: torch and its devices, the GPU driver, NCCL through CuPy, HDF5; each loaded by a probe.

A probe is a part of ``doctor/probes.py`` that runs in a subprocess, so that a library that hangs or
crashes is detected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.cluster.launcher import without_launcher
from hpctrain.doctor.findings import Finding, error, note, ok, warning
from hpctrain.util.probe import SAFE_PATH, Answer, facts_in, python, run_program

LOAD_TIMEOUT = 60.0  # seconds that a library may take to load, from a filesystem with cold caches
PREFIX = "hpctrain-doctor "  # of the line with a probe's facts
PROBES = Path(__file__).resolve().parent.parent / "probes.py"


def run_probe(
    name: str, *arguments: str, timeout: float = LOAD_TIMEOUT, isolated: bool = False, program: Path = PROBES
) -> Answer:
    """Run a probe of this name, not as a rank of this job, and return the facts that it prints.

    ``isolated`` leaves out site-packages, for a probe that needs only the standard library.
    """
    options = ["-I", "-S"] if isolated else []
    # A plain interpreter puts the program's own folder first in its path.
    command = python(*options, str(program), name, *arguments)
    found = run_program(command, timeout=timeout, environ={**without_launcher(os.environ), SAFE_PATH: "1"})
    facts = None if found.error else facts_in(found.text, PREFIX)
    if facts is None:
        return replace(found, error=found.error or "it printed nothing")
    return replace(found, facts=facts)


# Torch ----------------------------------------------------------------------------------------------------------------


_OLDEST_TORCH = (2, 11)
_SLOW = 20.0  # seconds; from a warm local disk it takes two
_BUSY = 2.0  # processes per core


def check_torch(torch: Answer) -> Iterator[Finding]:
    if torch.timed_out:
        yield error(
            "torch",
            f"import torch did not end in {LOAD_TIMEOUT:g} s",
            "its thousands of files come from a filesystem that is cold, overloaded or gone, and every rank of a job "
            "reads them at the same time",
            "try again in a minute; let jobs copy the environment to their nodes (hpctrain submit --stage env)",
        )
    elif torch.error:
        yield error("torch", f"import torch failed: {torch.error}", "nothing can be trained without it", _REINSTALL)
    else:
        yield from _check_loaded(torch)


_REINSTALL = "pip install torch, for the CUDA or ROCm of the compute nodes (pytorch.org says which index)"


def _check_loaded(torch: Answer) -> Iterator[Finding]:
    version, seconds = str(torch.facts["version"]), float(torch.facts["seconds"])
    text = f"{version}, {build(torch)}; import took {seconds:.{0 if seconds > _SLOW else 1}f} s"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST_TORCH:
        yield error("torch", version, "hpctrain needs torch 2.11 or newer", "pip install --upgrade torch")
    elif seconds > _SLOW and torch.facts["load"] > _BUSY:
        yield note(
            "torch",
            text,
            f"{torch.facts['load']:.0f} processes per core of this node want to run, so this time says little",
            "check again when the load is lower",
        )
    elif seconds > _SLOW:
        yield warning(
            "torch",
            text,
            "all ranks of a job import it at once, which is even slower, at each start of a job",
            "let jobs copy the environment to their nodes (hpctrain submit --stage env, docs/stage.md)",
        )
    else:
        yield ok("torch", text)


def build(torch: Answer) -> str:
    """Return the devices that torch was built for, as text."""
    if torch.facts.get("cuda"):
        return f"built for CUDA {torch.facts['cuda']}"
    return f"built for ROCm {torch.facts['hip']}" if torch.facts.get("hip") else "built for CPUs only"


# Checks of the GPU software: a driver that supports torch's CUDA version, and NCCL through CuPy -----------------------


_QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]


@dataclass(frozen=True)
class Gpus:
    """Answers of the driver and of CuPy."""

    driver: Answer
    cupy: Answer

    @property
    def names(self) -> list[str]:
        """Return the names of the GPUs that the driver reports."""
        rows = [] if self.driver.error else [line.split(",") for line in self.driver.text.splitlines()]
        return [row[0].strip() for row in rows if len(row) == 3]

    @property
    def version(self) -> str:
        row = self.driver.text.splitlines()[0].split(",")
        return row[1].strip()


def query_gpus() -> Gpus:
    return Gpus(run_program(_QUERY), run_probe("cupy"))


def check_gpus(gpus: Gpus, torch: Answer, environ: Mapping[str, str]) -> Iterator[Finding]:
    if gpus.driver.timed_out:
        yield error(
            "GPUs", "nvidia-smi does not answer", "the driver hangs: no program will see a GPU here", "tell the site"
        )
        return
    if gpus.names:
        yield from _check_seen(gpus, torch, environ)
    elif torch.facts.get("cuda") or torch.facts.get("hip"):
        yield note("GPUs", "none here", f"torch is {build(torch)}: try again on a node that has some")
    else:
        yield ok("GPUs", "none here, and torch needs none")
    if torch.facts.get("cuda"):
        yield from _check_nccl(gpus, torch)


def _check_seen(gpus: Gpus, torch: Answer, environ: Mapping[str, str]) -> Iterator[Finding]:
    text = f"{len(gpus.names)} x {gpus.names[0]}, driver {gpus.version}"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if torch.error or torch.facts.get("available"):
        yield ok("GPUs", text)
    elif not torch.facts.get("cuda"):
        yield warning(
            "GPUs", f"{text}, but torch is {build(torch)}", "training will not use the GPUs", "install torch for CUDA"
        )
    elif visible in ("", "-1"):
        yield note("GPUs", f"{text}, hidden by CUDA_VISIBLE_DEVICES={visible}", "ranks started here see no GPU")
    else:
        yield error(
            "GPUs",
            f"{text}, but torch, {build(torch)}, sees none",
            "the driver is too old for this CUDA, or does not answer",
            "install a torch for an older CUDA (nvidia-smi says which the driver knows), or load the site's module",
        )


def _check_nccl(gpus: Gpus, torch: Answer) -> Iterator[Finding]:
    own = f"torch has NCCL {torch.facts['nccl']}" if torch.facts.get("nccl") else "torch has no NCCL"
    if gpus.cupy.error:
        missing = "No module named" in gpus.cupy.error
        yield note(
            "NCCL",
            f"{'CuPy is not installed' if missing else f'CuPy does not load: {gpus.cupy.error}'}; {own}",
            "hpctrain reaches NCCL through CuPy; without it GPUs communicate by CUDA-aware MPI, or through host memory",
            "pip install 'hpctrain[cuda]'",
        )
    elif not gpus.cupy.facts.get("nccl"):
        yield note(
            "NCCL",
            f"CuPy {gpus.cupy.facts['cupy']} finds no NCCL; {own}",
            "GPUs will communicate by CUDA-aware MPI, or through host memory",
            "pip install nvidia-nccl-cu12, or load the site's NCCL",
        )
    else:
        yield ok("NCCL", f"{_nccl(int(gpus.cupy.facts['nccl']))} through CuPy {gpus.cupy.facts['cupy']}; {own}")


def _nccl(code: int) -> str:
    """Return the version for NCCL's version code (22703 is 2.27.3, 2804 is 2.8.4)."""
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


# Checks of h5py and its HDF5, which checkpoints and data files need ---------------------------------------------------


def check_hdf5(hdf5: Answer, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on HDF5 and on the variables that affect it."""
    if not hdf5.facts:
        text = f"did not end in {LOAD_TIMEOUT:g} s" if hdf5.timed_out else f"failed: {hdf5.error}"
        yield error("HDF5", f"import h5py {text}", "checkpoints and data are HDF5 files", "pip install h5py")
    else:
        kind = "with MPI" if hdf5.facts["mpi"] else "serial, which is all that hpctrain needs"
        yield ok("HDF5", f"{hdf5.facts['hdf5']} through h5py {hdf5.facts['h5py']} ({kind})")
    locking = environ.get("HDF5_USE_FILE_LOCKING")
    if locking is not None and locking.upper() in ("FALSE", "0"):
        yield note(
            "HDF5",
            f"HDF5_USE_FILE_LOCKING={locking}",
            "other programs may write to a file that somebody reads; hpctrain's runs have a lock of their own, which "
            "does not depend on it",
        )
    if plugins := environ.get("HDF5_PLUGIN_PATH"):
        yield note(
            "HDF5",
            f"HDF5_PLUGIN_PATH={plugins}",
            "a data file can name filters, and HDF5 runs code from there for them",
            "unset it unless your data needs it",
        )
