"""Probe of the versions of h5py and its HDF5."""

from __future__ import annotations

import json


def main() -> None:
    """Load h5py and print versions."""
    import h5py

    facts = {"h5py": h5py.version.version, "hdf5": h5py.version.hdf5_version, "mpi": bool(h5py.get_config().mpi)}
    print("hpctrain-doctor " + json.dumps(facts))


if __name__ == "__main__":
    main()
