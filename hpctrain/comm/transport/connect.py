"""Creation of the world transport: MPI if a launcher started this process, a single rank otherwise."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain.cluster import resources
from hpctrain.cluster.launcher import Launch, detect, ended_early
from hpctrain.cluster.world_check import check_pmi, check_world
from hpctrain.comm.transport.base import SingleTransport, Transport
from hpctrain.comm.transport.waiting import timeout_seconds
from hpctrain.errors import LaunchError
from hpctrain.log import logger

RDMA_DEVICES = Path("/sys/class/infiniband")  # also RoCE, Omni-Path and EFA


def connect(comm: Any = None, environ: MutableMapping[str, str] = os.environ) -> tuple[Transport, Launch]:
    """Return the transport of the world and the launcher's description of it.

    ``comm`` is an mpi4py communicator to use instead of ``COMM_WORLD``. Without ``comm`` and
    without a launcher, MPI is not imported. Raises ``LaunchError`` if the launcher started more
    ranks than MPI reports.
    """
    launch = detect(environ)
    if comm is None and launch.kind == "none":
        return SingleTransport(), launch
    MPI = start_mpi(launch, environ)
    if MPI is None:
        return SingleTransport(), launch
    from hpctrain.comm.transport.mpi import MpiTransport

    return MpiTransport(MPI.COMM_WORLD if comm is None else comm), launch


def start_mpi(launch: Launch, environ: MutableMapping[str, str] = os.environ, seconds: float | None = None) -> Any:
    """Initialize MPI and return mpi4py's module; None if it cannot be imported and this is a job of one process.

    Raises ``LaunchError`` if MPI_Init would fail or wait in vain, or if MPI sees fewer ranks than the launcher
    started. A rank that waits in MPI_Init for more than ``seconds`` (default: ``HPCTRAIN_TIMEOUT``) ends with the
    stacks of its threads.
    """
    check_pmi(launch, environ)
    exclude_unusable_ucx(environ)
    _check_node_memory(launch)
    if early := ended_early(launch):
        raise LaunchError(
            f"{early} of {launch.local_size} ranks on {socket.gethostname()} ended before MPI_Init: see what they "
            "printed, and that every rank calls hpctrain.init()"
        )
    try:
        with warnings.catch_warnings(), _deadline(timeout_seconds() if seconds is None else seconds):
            # mpi4py guesses this problem from the environment on every rank. check_world detects
            # it reliably and reports it once.
            warnings.filterwarnings("ignore", "\\s*suspicious MPI execution environment", RuntimeWarning)
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        check_world(launch, 1, None, reason=str(error))
        return None
    check_world(launch, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    return MPI


def _check_node_memory(launch: Launch) -> None:
    """Remove left-over files of dead jobs in /dev/shm; raise ``LaunchError`` if MPI_Init would die there of SIGBUS."""
    if not launch.local_rank:
        removed = resources.remove_left_over()
        if removed:
            text = "removed %d segments (%.1f MiB) that dead MPI jobs of this user left in %s"
            logger.info(text, len(removed), sum(one.nbytes for one in removed) / 2**20, resources.FOLDER)
    free, wanted = resources.free_bytes(), resources.STARTING * ((launch.local_size or 1) + 1)
    if launch.kind == "openmpi":
        wanted += resources.STARTING_OPENMPI
    if free is not None and free < wanted:
        raise LaunchError(
            f"{resources.FOLDER} has {free / 2**20:,.1f} MiB left, MPI needs at least {wanted / 2**20:,.0f} MiB to "
            f"start; {resources.ENLARGE}, or remove files there"
        )


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Terminate this process with a stack trace if MPI_Init waits too long for ranks that died before reaching it.

    MPI_Init holds the GIL, so a Python thread could not do this. Launchers end a job if one of its
    processes dies in MPI_Init.
    """
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    except (OSError, RuntimeError, ValueError):  # stderr is closed or has no file descriptor
        yield
        return
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def exclude_unusable_ucx(environ: MutableMapping[str, str], devices: Path = RDMA_DEVICES) -> None:
    """Exclude UCX from Open MPI's one-sided components on a node without a network that UCX supports for windows.

    On such a node Open MPI 5 skips ``osc/ucx`` anyway, but prints an error on every rank for every
    window. The variable is not set on a node with such a device, or if the user has configured
    ``osc`` or UCX: over InfiniBand ``osc/ucx`` may be the only component with remote memory access
    that needs no help of the target. Other MPI libraries ignore the variable. It takes effect only
    before ``MPI_Init``.
    """
    try:
        found = any(devices.iterdir())
    except OSError:
        found = False
    chosen = any(name in environ for name in ("OMPI_MCA_osc", "OMPI_MCA_pml"))
    chosen = chosen or any(name.startswith(("OMPI_MCA_osc_ucx_", "OMPI_MCA_pml_ucx_")) for name in environ)
    if not found and not chosen:
        environ["OMPI_MCA_osc"] = "^ucx"
