"""Tell the other ranks what this one is about to do, where ``HPCTRAIN_CHECK`` asks for that."""

from __future__ import annotations

from torch import Tensor

from hpctrain.collectives.check import order_check
from hpctrain.collectives.node.shared import SharedMemory
from hpctrain.transport.base import Transport


class Announcer:
    """Compare the operations of one communicator's ranks; all of them make it together."""

    def __init__(self, transport: Transport, memory: SharedMemory) -> None:
        self._check = order_check(transport)
        self._memory = memory

    @property
    def compares(self) -> bool:
        """Tell whether anything is compared."""
        return self._check is not None

    def __call__(self, operation: str, *tensors: Tensor, detail: str = "", where: Tensor | None = None) -> None:
        """Compare what all ranks are about to do.

        ``where`` is the tensor that must be the same piece of node memory on all ranks, or on all of them none.
        """
        if self._check is not None:
            place = "" if where is None else self._memory.name_of(where)
            self._check(operation, *tensors, detail=", ".join(filter(None, (detail, place))))

    def free(self) -> None:
        """Give back what it talks through; a call by all ranks."""
        if self._check is not None:
            self._check.free()
