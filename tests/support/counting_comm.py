"""Communicator that records its collectives."""

from __future__ import annotations

from typing import Any

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.transport.base import Transport

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


class CountingComm(Communicator):
    """Communicator that records the name and the largest tensor, in bytes, of each collective."""

    def __init__(self, transport: Transport) -> None:
        self.found: list[tuple[str, int]] = []
        super().__init__(transport)

    @classmethod
    def of(cls, comm: Communicator) -> CountingComm:
        """Return one of the same ranks. Collective; the caller frees it."""
        return cls(comm.transport.split(0, comm.rank))

    def take(self) -> list[tuple[str, int]]:
        """Return the collectives since the last call."""
        found, self.found = self.found, []
        return found


def _counted(name: str) -> Any:
    def call(self: CountingComm, *args: Any, **kwargs: Any) -> Any:
        largest = max(one.numel() * one.itemsize for one in args if hasattr(one, "numel"))
        self.found.append((name, largest))
        return getattr(Communicator, name)(self, *args, **kwargs)

    return call


for _kind in KINDS:
    setattr(CountingComm, _kind, _counted(_kind))
