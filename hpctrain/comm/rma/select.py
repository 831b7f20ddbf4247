"""Choice of the implementation of remote memory: MPI's one-sided operations after a self-test, or messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hpctrain.comm.rma.remote_memory import RemoteMemory
from hpctrain.comm.transport.base import Transport
from hpctrain.errors import SettingsError
from hpctrain.log import logger

if TYPE_CHECKING:
    from hpctrain.comm.transport.mpi import MpiTransport


VARIABLE = "HPCTRAIN_ONESIDED"
IMPLEMENTATIONS = ("auto", "mpi", "messages")


def expose(transport: Transport, length: int, dtype: torch.dtype = torch.float32, words: int = 0) -> RemoteMemory:
    """Return zeroed memory of ``length`` elements, and counters, that all ranks can access. Collective.

    Lengths may differ between ranks. ``dtype`` must be one that MPI can add (float32, float64,
    int32, int64). The variable ``HPCTRAIN_ONESIDED`` selects the implementation: mpi, messages, or
    auto, which uses mpi if it passes a test.
    """
    from hpctrain.comm.rma.remote_memory import LocalMemory

    requested = _requested()
    lengths = transport.all_gather_object(length)
    if transport.size == 1 and transport.name == "single":
        return LocalMemory(lengths, dtype, words)
    from hpctrain.comm.transport.mpi import MpiTransport

    assert isinstance(transport, MpiTransport)
    return _create(transport, requested, lengths, dtype, words)


def _requested() -> str:
    requested = os.environ.get(VARIABLE, "auto")
    if requested not in IMPLEMENTATIONS:
        raise SettingsError(f"{VARIABLE}={requested!r}: allowed are {', '.join(IMPLEMENTATIONS)}")
    return requested


def _create(
    transport: MpiTransport, requested: str, lengths: Sequence[int], dtype: torch.dtype, words: int
) -> RemoteMemory:
    from hpctrain.comm.rma.mpi_memory import RemoteMemoryByMessages, RemoteMemoryByRma

    if requested == "auto":
        failure = _self_test_failure(transport)
        if failure and transport.rank == 0:
            logger.warning("one-sided MPI %s: using messages instead (%s=mpi requires it)", failure, VARIABLE)
        requested = "messages" if failure else "mpi"
    chosen = RemoteMemoryByRma if requested == "mpi" else RemoteMemoryByMessages
    return chosen(transport.comm, lengths, dtype, words)


def _self_test_failure(transport: MpiTransport) -> str:
    """Return a description of a failure of the one-sided operations, the same on all ranks; empty if they pass."""
    from hpctrain.comm.rma.mpi_memory import self_test

    found = transport.all_gather_object(self_test(transport.comm))
    return next((f"{what} on rank {rank}" for rank, what in enumerate(found) if what), "")
