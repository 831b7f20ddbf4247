"""Collectives on host tensors, by the algorithm that the caller names or by the fastest applicable one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpctrain.collectives.choice.select import check_known
from hpctrain.collectives.choice.table import Layout, Table
from hpctrain.collectives.choice.ways import NODE_ALGORITHMS, Ways, borrowed
from hpctrain.collectives.messages import pairwise, tree
from hpctrain.collectives.node.shared import SharedMemory
from hpctrain.collectives.reduction import Reducer
from hpctrain.collectives.topology import Topology
from hpctrain.transport.base import Finished, Transport, Work

T = TypeVar("T", bound=Callable[..., object])

KEPT = 1024  # maximum number of prepared calls; a program that never reuses a tensor must not fill the memory


class HostCollectives:
    """Collectives of flat, contiguous host tensors among several ranks of a transport.

    The call for a tensor is prepared once and cached, because preparation takes longer than the
    reduction of a small tensor. Shares of ``reduce_scatter`` and ``all_gather`` are equal.
    """

    def __init__(self, transport: Transport, node: Transport, place: Topology) -> None:
        reducer = Reducer()
        self.transport = transport
        self.memory = SharedMemory(transport, node, place, reducer)
        self._ways = Ways(transport, reducer, self.memory)
        self.kept: dict[Hashable, Callable[..., Any]] = {}  # by operation, addresses, sizes, dtype, and options

    def use_tables(self, tables: Mapping[Layout, Table]) -> None:
        """Choose algorithms by measured tables, the same on all ranks. Collective."""
        self._ways.use_tables(tables)
        self.kept.clear()

    def empty(self, numel: int, dtype: torch.dtype, *, common: bool = False, must_share: bool = False) -> Tensor:
        """Return a flat tensor, in node memory if available. Collective."""
        self.kept.clear()  # the new tensor may reuse an address that was private memory on this rank only
        return self.memory.empty(numel, dtype, common=common, must_share=must_share)

    def free(self) -> None:
        """Free node memory. Collective."""
        self.kept.clear()
        self.memory.free()

    # Collectives ------------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int, algorithm: str = "auto") -> None:
        """Copy the root's tensor to every rank, in place."""
        key = ("broadcast", tensor.data_ptr(), tensor.numel(), tensor.dtype, root, algorithm)
        if self._moves("broadcast", algorithm, tensor):
            self._keep(key, lambda: self._ways.broadcast(tensor, root, algorithm))()

    def reduce(self, tensor: Tensor, op: str, root: int, algorithm: str = "auto") -> None:
        """Reduce into the root's tensor; other ranks' tensors are unchanged."""
        key = ("reduce", tensor.data_ptr(), tensor.numel(), tensor.dtype, op, root, algorithm)
        if self._moves("reduce", algorithm, tensor):
            self._keep(key, lambda: self._ways.reduce(tensor, op, root, algorithm))()

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str = "auto") -> None:
        """Reduce over all ranks, in place."""
        key = ("all_reduce", tensor.data_ptr(), tensor.numel(), tensor.dtype, op, algorithm)
        if self._moves("all_reduce", algorithm, tensor):
            self._keep(key, lambda: self._ways.all_reduce(tensor, op, algorithm))()

    def start_all_reduce(self, tensor: Tensor, op: str, algorithm: str = "auto") -> Work:
        """Start to reduce over all ranks, in place; only a reduction in node memory is asynchronous."""
        key = ("start_all_reduce", tensor.data_ptr(), tensor.numel(), tensor.dtype, op, algorithm)
        if key not in self.kept and not self._stays_under_way(tensor, "all_reduce", algorithm):
            self.all_reduce(tensor, op, algorithm)
            return Finished()
        return self._keep(key, lambda: self.memory.node.start_all_reduce(tensor, op))()

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str = "auto") -> None:
        """Reduce over all ranks and store this rank's share in ``out``."""
        key = pair_key("reduce_scatter", out, tensor, op, algorithm)
        if self._moves("reduce_scatter", algorithm, out):
            self._keep(key, lambda: self._ways.reduce_scatter(out, tensor, op, algorithm))()
        else:
            out.copy_(tensor)

    def start_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str = "auto") -> Work:
        """Start to reduce over all ranks and store this rank's share; asynchronous as in ``start_all_reduce``."""
        key = pair_key("start_reduce_scatter", out, tensor, op, algorithm)
        if key not in self.kept and not self._stays_under_way(tensor, "reduce_scatter", algorithm):
            self.reduce_scatter(out, tensor, op, algorithm)
            return Finished()
        return self._keep(key, lambda: self.memory.node.start_reduce_scatter(borrowed(out), tensor, op))(out)

    def all_gather(self, out: Tensor, tensor: Tensor, algorithm: str = "auto") -> None:
        """Concatenate the tensors of all ranks, in rank order."""
        key = pair_key("all_gather", out, tensor, algorithm)
        if self._moves("all_gather", algorithm, tensor):
            self._keep(key, lambda: self._ways.all_gather(out, tensor, algorithm))()
        else:
            out.copy_(tensor)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Concatenate the tensors of all ranks on the root; only the root passes ``out``."""
        tree.gather(self.transport, out, tensor, root)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> None:
        """Copy each rank's share of the root's tensor to ``out``; only the root passes ``tensor``."""
        tree.scatter(self.transport, out, tensor, root)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Send share r to rank r; store the received shares in rank order."""
        pairwise.all_to_all(self.transport, out, tensor)

    def _moves(self, operation: str, algorithm: str, tensor: Tensor) -> bool:
        """Return whether communication is needed; refuse an unknown algorithm in any case."""
        if self.transport.size > 1 and tensor.numel():
            return True
        check_known(operation, algorithm)
        return False

    def _stays_under_way(self, tensor: Tensor, operation: str, algorithm: str) -> bool:
        """Return whether a started operation runs in node memory, where it can remain in progress on return."""
        if not tensor.numel() or self.memory.place_of(tensor) != "window":
            return False
        able = algorithm in NODE_ALGORITHMS and not self.memory.why_not(algorithm, operation, "window")
        return algorithm == "auto" or able

    def _keep(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self.kept.get(key)
        if found is None:
            if len(self.kept) >= KEPT:
                self.kept.clear()
            found = self.kept[key] = make()
        return found  # type: ignore[return-value]


def pair_key(operation: str, out: Tensor, tensor: Tensor, *how: str) -> Hashable:
    """Return the cache key of an operation on two tensors; a cached call needs no second check."""
    return operation, out.data_ptr(), tensor.data_ptr(), out.numel(), tensor.numel(), out.dtype, tensor.dtype, how
