"""Choose what carries exposed memory: MPI's one-sided operations where they prove themselves, messages elsewhere."""

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
    """Return memory of ``length`` zeros, and counters, that all ranks may reach; a call by all ranks.

    Lengths may differ between ranks, ``dtype`` is one that MPI adds (float32, float64, int32, int64). The variable
    ``HPCTRAIN_ONESIDED`` chooses the carrier: mpi, messages, or auto, which tries the first before it trusts it.
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
            logger.warning("one-sided MPI %s: messages carry what it would (%s=mpi insists)", trouble, VARIABLE)
        wanted = "messages" if trouble else "mpi"
    chosen = ExposedByRma if wanted == "mpi" else ExposedByMessages
    return chosen(transport.comm, lengths, dtype, words)


def _trouble(transport: MpiTransport) -> str:
    """Return in words what one-sided operations get wrong, the same on all ranks; empty where all is well."""
    from hpctrain.transport.onesided.trial import trial

    found = transport.all_gather_object(trial(transport.comm))
    return next((f"{what} on rank {rank}" for rank, what in enumerate(found) if what), "")
