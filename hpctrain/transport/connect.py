"""Find the world: MPI where a launcher started us, one rank alone where none did."""

from __future__ import annotations

import os
import warnings
from typing import Any

from hpctrain.cluster.launcher import Launch, detect
from hpctrain.cluster.promise import check_language, check_promise
from hpctrain.transport.base import Transport
from hpctrain.transport.single import SingleTransport


def connect(comm: Any = None) -> tuple[Transport, Launch]:
    """Return the transport of the world and what the launcher said of it.

    ``comm`` is any mpi4py communicator to use in place of ``COMM_WORLD``. Without one and without a launcher, MPI is
    not even imported. Raises ``LaunchError`` where the launcher started more ranks than MPI sees.
    """
    launch = detect(os.environ)
    if comm is None and launch.kind == "none":
        return SingleTransport(), launch
    check_language(launch, os.environ)
    try:
        with warnings.catch_warnings():
            # What mpi4py suspects from the environment, check_promise knows, and says once and not on every rank.
            warnings.filterwarnings("ignore", "\\s*suspicious MPI execution environment", RuntimeWarning)
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        check_promise(launch, 1, None, reason=str(error))
        return SingleTransport(), launch

    check_promise(launch, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    from hpctrain.transport.mpi import MpiTransport

    return MpiTransport(MPI.COMM_WORLD if comm is None else comm), launch
