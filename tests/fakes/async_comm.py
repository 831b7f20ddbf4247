"""Fake rank with late collectives: a result is NaN until the computing stream has waited for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fakes.streams import LazyStreams
from torch import Tensor

from hpctrain.comm.transport.base import Finished


class LateRank:
    """Communicator of one rank on a device with ``LazyStreams``; ``log`` lists its collectives.

    Host tensors represent those of the device. Agreements and tensors of bytes belong to the host and are immediate.
    """

    rank, size, node, nodes, local_rank, local_size = 0, 1, 0, 1, 0, 1
    uniform, shares_memory = True, False

    def __init__(self, streams: LazyStreams, log: list[Any]) -> None:
        self.streams, self.log = streams, log
        self.lasting = set[int]()  # memory of which the rank owns a slice permanently
        self._under_way = 0  # all-gathers there

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item]

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        return item

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return tensor

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int = 0) -> Tensor:
        assert tensor is not None
        return out.copy_(tensor)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        self.log.append(("all_reduce", tensor.nbytes))
        return tensor

    def all_gather(self, out: Tensor, tensor: Tensor) -> Tensor:
        if memory_of(out) in self.lasting:
            return self._gather_in_place(out, tensor)
        given = tensor.clone()
        out.fill_(torch.nan)

        def come() -> None:
            assert out.untyped_storage().nbytes(), "memory was given back before what was gathered there had come"
            out.copy_(given)

        return self._late("gather", out, come)

    def _gather_in_place(self, out: Tensor, tensor: Tensor) -> Tensor:
        """Read the rank's own slice as early as possible, and write all slices, its own too, as late as possible."""
        read = [] if self._under_way else [tensor.clone()]
        self._under_way += 1

        def come() -> None:
            self._under_way -= 1
            out.copy_(read[0] if read else tensor.clone())

        return self._late("gather", out, come)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        out.fill_(torch.nan)
        self._late("reduce", tensor, lambda: out.copy_(tensor))
        return Finished() if async_op else out

    def _late(self, kind: str, tensor: Tensor, action: Callable[[], object]) -> Tensor:
        assert self.streams.current() is not self.streams.streams[0], f"{kind} runs on the stream that computes"
        self.log.append((kind, memory_of(tensor)))
        self.streams.enqueue(self.streams.current(), action)
        return tensor


def memory_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory that is valid even while its storage is empty."""
    return int(tensor.untyped_storage()._cdata)
