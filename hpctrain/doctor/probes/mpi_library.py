"""Probe of the versions of mpi4py and its MPI; MPI is loaded, but not initialized."""

from __future__ import annotations

import json
from importlib import metadata


def main() -> None:
    """Load MPI with mpi4py and print versions."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    print(
        "hpctrain-doctor "
        + json.dumps(
            {
                "mpi4py": metadata.version("mpi4py"),
                "library": MPI.Get_library_version().strip("\0"),
                "standard": ".".join(map(str, MPI.Get_version())),
                "module": MPI.__file__,
                "config": {key: str(value) for key, value in mpi4py.get_config().items()},
            }
        )
    )


if __name__ == "__main__":
    main()
