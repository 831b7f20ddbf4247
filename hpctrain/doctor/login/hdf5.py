"""Checks of h5py and its HDF5, which checkpoints and data files need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpctrain.doctor.findings import Finding, error, note, ok
from hpctrain.doctor.login.probe import LOAD_TIMEOUT, run_probe
from hpctrain.util.probe import Answer


def gather() -> Answer:
    """Load h5py in a subprocess."""
    return run_probe("hdf5")


def check(hdf5: Answer, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on HDF5 and on the variables that affect it."""
    if not hdf5.facts:
        told = f"did not end in {LOAD_TIMEOUT:g} s" if hdf5.timed_out else f"failed: {hdf5.error}"
        yield error("HDF5", f"import h5py {told}", "checkpoints and data are HDF5 files", "pip install h5py")
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
