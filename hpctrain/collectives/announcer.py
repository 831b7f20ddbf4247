"""Collective mismatch detector of one communicator, enabled by ``HPCTRAIN_CHECK``."""

from __future__ import annotations

from torch import Tensor

from hpctrain.collectives.check import order_check
from hpctrain.collectives.node.shared import SharedMemory
from hpctrain.transport.base import Transport


class Announcer:
    """Collective mismatch detector: compares the operations of one communicator's ranks. Construction is collective."""

    def __init__(self, transport: Transport, memory: SharedMemory) -> None:
        self._check = order_check(transport)
        self._memory = memory

    @property
    def compares(self) -> bool:
        """Return whether operations are compared."""
        return self._check is not None

    def __call__(self, operation: str, *tensors: Tensor, detail: str = "", where: Tensor | None = None) -> None:
        """Compare the operation that each rank is about to start. Collective.

        ``where`` is a tensor that must be the same segment of node-shared memory on all ranks, or
        outside of shared memory on all ranks.
        """
        if self._check is not None:
            place = "" if where is None else self._memory.name_of(where)
            self._check(operation, *tensors, detail=", ".join(filter(None, (detail, place))))

    def free(self) -> None:
        """Free the transport that the detector uses. Collective."""
        if self._check is not None:
            self._check.free()
