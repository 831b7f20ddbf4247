"""Choice of the implementation of remote memory: MPI's one-sided operations after a self-test, or messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hpctrain.comm.rma.remote_memory import LocalMemory, RemoteMemory
from hpctrain.comm.transport.base import Transport
from hpctrain.errors import SettingsError
from hpctrain.log import logger

if TYPE_CHECKING:
    from mpi4py import MPI


VARIABLE = "HPCTRAIN_ONESIDED"
IMPLEMENTATIONS = ("auto", "mpi", "messages")


def expose(
    transport: Transport,
    length: int,
    dtype: torch.dtype = torch.float32,
    words: int = 0,
    self_test: Callable[[MPI.Intracomm], str] | None = None,
) -> RemoteMemory:
    """Return zeroed memory of ``length`` elements, and counters, that all ranks can access. Collective.

    Lengths may differ between ranks. ``dtype`` must be one that MPI can add (float32, float64,
    int32, int64). The variable ``HPCTRAIN_ONESIDED`` selects the implementation: mpi, messages, or
    auto, which uses mpi if it passes the ``self_test`` (default: ``mpi_memory.self_test``).
    """
    requested = _requested()
    lengths = transport.all_gather_object(length)
    if transport.size == 1 and transport.name == "single":
        return LocalMemory(lengths, dtype, words)
    from hpctrain.comm.rma import mpi_memory
    from hpctrain.comm.transport.mpi import MpiTransport

    assert isinstance(transport, MpiTransport)
    if requested == "auto":
        # The same result on all ranks: empty if the one-sided operations pass.
        found = transport.all_gather_object((self_test or mpi_memory.self_test)(transport.comm))
        failure = next((f"{what} on rank {rank}" for rank, what in enumerate(found) if what), "")
        if failure and transport.rank == 0:
            logger.warning("one-sided MPI %s: using messages instead (%s=mpi requires it)", failure, VARIABLE)
        requested = "messages" if failure else "mpi"
    chosen = mpi_memory.RemoteMemoryByRma if requested == "mpi" else mpi_memory.RemoteMemoryByMessages
    return chosen(transport.comm, lengths, dtype, words)


def _requested() -> str:
    requested = os.environ.get(VARIABLE, "auto")
    if requested not in IMPLEMENTATIONS:
        raise SettingsError(f"{VARIABLE}={requested!r}: allowed are {', '.join(IMPLEMENTATIONS)}")
    return requested
