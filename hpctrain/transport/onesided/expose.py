"""Choice of the implementation of remote memory: MPI's one-sided operations if they pass a test, messages otherwise."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hpctrain.errors import SettingsError
from hpctrain.log import logger
from hpctrain.transport.base import Transport
from hpctrain.transport.onesided.exposed import Exposed

if TYPE_CHECKING:
    from hpctrain.transport.mpi import MpiTransport

VARIABLE = "HPCTRAIN_ONESIDED"
WAYS = ("auto", "mpi", "messages")


def expose(transport: Transport, length: int, dtype: torch.dtype = torch.float32, words: int = 0) -> Exposed:
    """Return zeroed memory of ``length`` elements, and counters, that all ranks can access. Collective.

    Lengths may differ between ranks. ``dtype`` must be one that MPI can add (float32, float64,
    int32, int64). The variable ``HPCTRAIN_ONESIDED`` selects the implementation: mpi, messages, or
    auto, which uses mpi if it passes a test.
    """
    from hpctrain.transport.onesided.alone import ExposedAlone

    wanted = _wanted()
    lengths = transport.all_gather_object(length)
    if transport.size == 1 and transport.name == "single":
        return ExposedAlone(lengths, dtype, words)
    from hpctrain.transport.mpi import MpiTransport

    assert isinstance(transport, MpiTransport)
    return _over_mpi(transport, wanted, lengths, dtype, words)


def _wanted() -> str:
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in WAYS:
        raise SettingsError(f"{VARIABLE}={wanted!r}: allowed are {', '.join(WAYS)}")
    return wanted


def _over_mpi(
    transport: MpiTransport, wanted: str, lengths: Sequence[int], dtype: torch.dtype, words: int
) -> Exposed:
    from hpctrain.transport.onesided.rma import ExposedByRma
    from hpctrain.transport.onesided.served import ExposedByMessages

    if wanted == "auto":
        trouble = _trouble(transport)
        if trouble and transport.rank == 0:
            logger.warning("one-sided MPI %s: using messages instead (%s=mpi requires it)", trouble, VARIABLE)
        wanted = "messages" if trouble else "mpi"
    chosen = ExposedByRma if wanted == "mpi" else ExposedByMessages
    return chosen(transport.comm, lengths, dtype, words)


def _trouble(transport: MpiTransport) -> str:
    """Return a description of a failure of the one-sided operations, the same on all ranks; empty if they pass."""
    from hpctrain.transport.onesided.trial import trial

    found = transport.all_gather_object(trial(transport.comm))
    return next((f"{what} on rank {rank}" for rank, what in enumerate(found) if what), "")
