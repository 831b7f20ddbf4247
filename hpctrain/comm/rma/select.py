"""Choice of the implementation of remote memory: MPI's one-sided operations after a self-test, or messages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

from hpctrain.comm.rma.mpi_rma import RemoteMemoryByRma
from hpctrain.comm.rma.remote_memory import RemoteMemory
from hpctrain.comm.transport.base import Transport
from hpctrain.errors import SettingsError
from hpctrain.log import logger

if TYPE_CHECKING:
    from hpctrain.comm.transport.mpi import MpiTransport

LENGTH = 1000  # elements per rank


def trial(comm: MPI.Intracomm) -> str:
    """Return a description of a failure; empty if the test passes. Collective.

    Each rank writes and adds to the memory of the rank farthest from it, and reads it back. All
    ranks add to one counter.
    """
    try:
        exposed = RemoteMemoryByRma(comm, [LENGTH] * comm.size, torch.float32, 1)
    except MPI.Exception as error:
        return f"cannot be set up ({str(error).splitlines()[0]})"
    try:
        return _tried(exposed, comm)
    except MPI.Exception as error:
        return f"fails ({str(error).splitlines()[0]})"
    finally:
        exposed.free()


def _tried(exposed: RemoteMemoryByRma, comm: MPI.Intracomm) -> str:
    target = (comm.rank + (comm.size + 1) // 2) % comm.size
    written, back = torch.arange(float(LENGTH)), torch.zeros(LENGTH)
    exposed.put(target, written[: LENGTH // 2])
    exposed.add(target, written[LENGTH // 2 :], LENGTH // 2)
    exposed.add(target, torch.ones(LENGTH))
    exposed.get(target, back)
    exposed.fetch_add(0, 0, comm.rank + 1)
    exposed.barrier()
    found = _wrong(exposed, back, written + 1, comm.size * (comm.size + 1) // 2)
    exposed.barrier()  # in any case: no rank may free memory that another rank still reads
    return found


def _wrong(exposed: RemoteMemoryByRma, back: torch.Tensor, expected: torch.Tensor, total: int) -> str:
    if not torch.equal(back, expected):
        return "reads back other numbers than were written"
    own = exposed.view(exposed.rank)
    if own is None or not torch.equal(own, expected):
        return "leaves other numbers in memory than were written"
    return "loses additions to a counter" if exposed.fetch_add(0, 0) != total else ""


# Choice of the implementation of remote memory


VARIABLE = "HPCTRAIN_ONESIDED"
WAYS = ("auto", "mpi", "messages")


def expose(transport: Transport, length: int, dtype: torch.dtype = torch.float32, words: int = 0) -> RemoteMemory:
    """Return zeroed memory of ``length`` elements, and counters, that all ranks can access. Collective.

    Lengths may differ between ranks. ``dtype`` must be one that MPI can add (float32, float64,
    int32, int64). The variable ``HPCTRAIN_ONESIDED`` selects the implementation: mpi, messages, or
    auto, which uses mpi if it passes a test.
    """
    from hpctrain.comm.rma.remote_memory import LocalMemory

    wanted = _wanted()
    lengths = transport.all_gather_object(length)
    if transport.size == 1 and transport.name == "single":
        return LocalMemory(lengths, dtype, words)
    from hpctrain.comm.transport.mpi import MpiTransport

    assert isinstance(transport, MpiTransport)
    return _over_mpi(transport, wanted, lengths, dtype, words)


def _wanted() -> str:
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in WAYS:
        raise SettingsError(f"{VARIABLE}={wanted!r}: allowed are {', '.join(WAYS)}")
    return wanted


def _over_mpi(
    transport: MpiTransport, wanted: str, lengths: Sequence[int], dtype: torch.dtype, words: int
) -> RemoteMemory:
    from hpctrain.comm.rma.emulated import RemoteMemoryByMessages
    from hpctrain.comm.rma.mpi_rma import RemoteMemoryByRma

    if wanted == "auto":
        trouble = _trouble(transport)
        if trouble and transport.rank == 0:
            logger.warning("one-sided MPI %s: using messages instead (%s=mpi requires it)", trouble, VARIABLE)
        wanted = "messages" if trouble else "mpi"
    chosen = RemoteMemoryByRma if wanted == "mpi" else RemoteMemoryByMessages
    return chosen(transport.comm, lengths, dtype, words)


def _trouble(transport: MpiTransport) -> str:
    """Return a description of a failure of the one-sided operations, the same on all ranks; empty if they pass."""

    found = transport.all_gather_object(trial(transport.comm))
    return next((f"{what} on rank {rank}" for rank, what in enumerate(found) if what), "")
