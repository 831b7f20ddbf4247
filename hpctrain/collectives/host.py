"""Carry out collectives on host tensors, by the algorithm that is named or by the one that serves best."""

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

KEPT = 1024  # ways kept; who reduces ever other tensors shall not fill the memory with them


class HostCollectives:
    """Hold the collectives of flat, contiguous host tensors among several ranks of a transport.

    How to carry out an operation is decided once for a tensor and kept, because a small tensor is reduced in less time
    than that takes. Shares of ``reduce_scatter`` and ``all_gather`` are equal.
    """

    def __init__(self, transport: Transport, node: Transport, place: Topology) -> None:
        reducer = Reducer()
        self.transport = transport
        self.memory = SharedMemory(transport, node, place, reducer)
        self._ways = Ways(transport, reducer, self.memory)
        self.kept: dict[Hashable, Callable[..., Any]] = {}  # by operation, addresses, sizes, dtype, and how

    def use_tables(self, tables: Mapping[Layout, Table]) -> None:
        """Choose by what was measured; a call by all ranks with the same tables."""
        self._ways.use_tables(tables)
        self.kept.clear()

    def empty(self, numel: int, dtype: torch.dtype, *, common: bool = False, must_share: bool = False) -> Tensor:
        """Return a flat tensor in node memory where there is some; a call by all ranks."""
        self.kept.clear()  # the new tensor may lie where this rank, but no other, had memory of its own
        return self.memory.empty(numel, dtype, common=common, must_share=must_share)

    def free(self) -> None:
        """Give node memory back; a call by all ranks."""
        self.kept.clear()
        self.memory.free()

    # Collectives ------------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int, algorithm: str = "auto") -> None:
        """Copy the root's tensor to every rank, in place."""
        key = ("broadcast", tensor.data_ptr(), tensor.numel(), tensor.dtype, root, algorithm)
        if self._moves("broadcast", algorithm, tensor):
            self._keep(key, lambda: self._ways.broadcast(tensor, root, algorithm))()

    def reduce(self, tensor: Tensor, op: str, root: int, algorithm: str = "auto") -> None:
        """Reduce into the root's tensor; the others keep theirs."""
        key = ("reduce", tensor.data_ptr(), tensor.numel(), tensor.dtype, op, root, algorithm)
        if self._moves("reduce", algorithm, tensor):
            self._keep(key, lambda: self._ways.reduce(tensor, op, root, algorithm))()

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str = "auto") -> None:
        """Reduce over all ranks, in place."""
        key = ("all_reduce", tensor.data_ptr(), tensor.numel(), tensor.dtype, op, algorithm)
        if self._moves("all_reduce", algorithm, tensor):
            self._keep(key, lambda: self._ways.all_reduce(tensor, op, algorithm))()

    def start_all_reduce(self, tensor: Tensor, op: str, algorithm: str = "auto") -> Work:
        """Start to reduce over all ranks, in place; only in node memory it is left under way."""
        key = ("start_all_reduce", tensor.data_ptr(), tensor.numel(), tensor.dtype, op, algorithm)
        if key not in self.kept and not self._stays_under_way(tensor, "all_reduce", algorithm):
            self.all_reduce(tensor, op, algorithm)
            return Finished()
        return self._keep(key, lambda: self.memory.node.start_all_reduce(tensor, op))()

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str = "auto") -> None:
        """Reduce over all ranks and keep this rank's share in ``out``."""
        key = pair_key("reduce_scatter", out, tensor, op, algorithm)
        if self._moves("reduce_scatter", algorithm, out):
            self._keep(key, lambda: self._ways.reduce_scatter(out, tensor, op, algorithm))()
        else:
            out.copy_(tensor)

    def start_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str = "auto") -> Work:
        """Start to reduce over all ranks and keep this rank's share; left under way as ``start_all_reduce`` is."""
        key = pair_key("start_reduce_scatter", out, tensor, op, algorithm)
        if key not in self.kept and not self._stays_under_way(tensor, "reduce_scatter", algorithm):
            self.reduce_scatter(out, tensor, op, algorithm)
            return Finished()
        return self._keep(key, lambda: self.memory.node.start_reduce_scatter(borrowed(out), tensor, op))(out)

    def all_gather(self, out: Tensor, tensor: Tensor, algorithm: str = "auto") -> None:
        """Put the tensors of all ranks behind each other, in rank order."""
        key = pair_key("all_gather", out, tensor, algorithm)
        if self._moves("all_gather", algorithm, tensor):
            self._keep(key, lambda: self._ways.all_gather(out, tensor, algorithm))()
        else:
            out.copy_(tensor)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Put the tensors of all ranks behind each other on the root, which alone gives ``out``."""
        tree.gather(self.transport, out, tensor, root)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> None:
        """Give each rank its share of the root's tensor, which alone gives one."""
        tree.scatter(self.transport, out, tensor, root)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Send share r to rank r, and keep the shares that come in rank order."""
        pairwise.all_to_all(self.transport, out, tensor)

    def _moves(self, operation: str, algorithm: str, tensor: Tensor) -> bool:
        """Tell whether anything has to go anywhere; a wrong name is refused all the same."""
        if self.transport.size > 1 and tensor.numel():
            return True
        check_known(operation, algorithm)
        return False

    def _stays_under_way(self, tensor: Tensor, operation: str, algorithm: str) -> bool:
        """Tell whether an operation that is only started is done in node memory, where it need not end at once."""
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
    """Return what tells an operation on two tensors from others: who has checked them need not check them again."""
    return operation, out.data_ptr(), tensor.data_ptr(), out.numel(), tensor.numel(), out.dtype, tensor.dtype, how
