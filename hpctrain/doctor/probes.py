"""Program that loads one library, or queries one folder, and prints the properties as one line of JSON.

``python probes.py NAME [ARGUMENT ...]``; ``login/probe.py`` runs it. It imports only the standard
library and the library in question, so that it also runs without site-packages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def torch_build() -> dict[str, Any]:
    """Load torch; return its version and build, its load time, and the load average per core."""
    began = time.perf_counter()
    import torch

    return {
        "seconds": time.perf_counter() - began,
        "load": os.getloadavg()[0] / (os.cpu_count() or 1),
        "version": str(torch.__version__),
        "file": torch.__file__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "available": torch.cuda.is_available(),
        "devices": torch.cuda.device_count(),
        "nccl": _torch_nccl(torch),
        "threads": torch.get_num_threads(),
    }


def _torch_nccl(torch: Any) -> str | None:
    """Return the version of the NCCL that torch contains."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, ImportError, RuntimeError, TypeError):
        return None


def cupy_versions() -> dict[str, Any]:
    """Load CuPy; return the versions of CuPy, its NCCL and its CUDA."""
    import cupy

    facts = {"cupy": cupy.__version__, "nccl": None, "runtime": None}
    try:
        from cupy.cuda import nccl

        facts["nccl"] = nccl.get_version() or None
        facts["runtime"] = cupy.cuda.runtime.runtimeGetVersion()
    except (ImportError, AttributeError, cupy.cuda.runtime.CUDARuntimeError):
        pass  # missing libraries show as missing versions
    return facts


def mpi_versions() -> dict[str, Any]:
    """Load MPI with mpi4py, without initializing it; return the versions of both."""
    from importlib import metadata

    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {
        "mpi4py": metadata.version("mpi4py"),
        "library": MPI.Get_library_version().strip("\0"),
        "standard": ".".join(map(str, MPI.Get_version())),
        "module": MPI.__file__,
        "config": {key: str(value) for key, value in mpi4py.get_config().items()},
    }


def hdf5_versions() -> dict[str, Any]:
    """Load h5py; return its version and that of its HDF5."""
    import h5py

    return {"h5py": h5py.version.version, "hdf5": h5py.version.hdf5_version, "mpi": bool(h5py.get_config().mpi)}


def image_packages() -> dict[str, Any]:
    """Return what an image of a container has: versions of packages, and the answers of other probes."""
    from importlib import metadata

    found: dict[str, Any] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("hpctrain", "numpy", "h5py"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    for name, probe in {"torch": torch_build, "mpi": mpi_versions}.items():
        try:
            found[name] = probe()
        except Exception as error:  # of any kind: a library that does not load raises what it likes
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def folder_space(path: str) -> dict[str, Any]:
    """Return size and free space in bytes, the number of free files, and whether this user may write.

    A filesystem that is down never answers, therefore this runs in a process of its own.
    """
    folder = Path(path)
    if not folder.is_dir():
        return {"there": False}
    status = os.statvfs(folder)
    return {
        "there": True,
        "size": status.f_blocks * status.f_frsize,
        "free": status.f_bavail * status.f_frsize,
        "files": status.f_files,
        "files_free": status.f_favail,
        "writable": os.access(folder, os.W_OK | os.X_OK),
    }


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": torch_build,
    "cupy": cupy_versions,
    "mpi": mpi_versions,
    "hdf5": hdf5_versions,
    "space": folder_space,
    "image": image_packages,
}


def main() -> None:
    name, *arguments = sys.argv[1:]
    print("hpctrain-doctor " + json.dumps(PROBES[name](*arguments)))


if __name__ == "__main__":
    main()
