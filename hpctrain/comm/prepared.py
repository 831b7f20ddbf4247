"""Preparation of calls: selects the algorithm of an operation on given tensors and binds its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.algorithms import direct, double_tree, recursive, ring, tree
from hpctrain.comm.reduction import Reducer, average_scale, carrier_op
from hpctrain.comm.shm.memory import SharedMemory
from hpctrain.comm.transport.base import Transport
from hpctrain.comm.tuning.selection import choose, default_table
from hpctrain.comm.tuning.table import AlgorithmTable, RankLayout
from hpctrain.errors import CommunicationError

Way = Callable[[], object]
_Makers = Mapping[str, Callable[[], Way]]  # by algorithm

NODE_ALGORITHMS = ("window", "hierarchical")


class PreparedCalls:
    """Factory of prepared calls for flat, contiguous, nonempty host tensors among several ranks.

    A prepared call holds the address of its tensors' memory but no reference to the tensors. A
    cached call may therefore be used only while tensors of the same size and type exist at these
    addresses.
    """

    def __init__(self, transport: Transport, reducer: Reducer, memory: SharedMemory) -> None:
        self._transport = transport
        self._reducer = reducer
        self._memory = memory
        self._layout = RankLayout(transport.size, memory.place.nodes, memory.place.local_size)
        self._default = default_table(self._layout, memory.place.crowded)
        self._tables: tuple[AlgorithmTable, ...] = (self._default,)

    def use_tables(self, tables: Mapping[RankLayout, AlgorithmTable]) -> None:
        """Choose algorithms by the measurements for this layout of ranks; use the defaults for missing entries."""
        measured = tables.get(self._layout)
        self._tables = (self._default,) if measured is None else (measured, self._default)

    def broadcast(self, tensor: Tensor, root: int, algorithm: str) -> Way:
        """Return a prepared call that copies the root's tensor to every rank."""
        place, lent, transport = self._memory.place_of(tensor), borrowed(tensor), self._transport
        makers: _Makers = {
            "mpi": lambda: transport.prepared_broadcast(lent, root),
            "tree": lambda: partial(tree.broadcast, transport, lent, root),
            "ring": lambda: partial(ring.broadcast, transport, lent, root),
            "double_tree": lambda: partial(double_tree.broadcast, transport, lent, root),
            **self._in_node(
                lambda: self._memory.node.broadcast(lent, root)
                if place == "window"
                else self._memory.node.staged.broadcast(lent, root)
            ),
        }
        return self._make("broadcast", algorithm, makers, place, tensor.nbytes)

    def reduce(self, tensor: Tensor, op: str, root: int, algorithm: str) -> Way:
        """Return a prepared call that reduces into the root's tensor."""
        place, lent, transport = self._memory.place_of(tensor), borrowed(tensor), self._transport
        makers: _Makers = {
            "mpi": lambda: self._scaled(transport.prepared_reduce(lent, carrier_op(op), root), lent, op, root),
            "tree": lambda: partial(tree.reduce, transport, self._reducer, lent, op, root),
            "double_tree": lambda: partial(double_tree.reduce, transport, self._reducer, lent, op, root),
            "window": lambda: self._memory.node.reduce(lent, op, root),
        }
        return self._make("reduce", algorithm, makers, place, tensor.nbytes, (tensor.dtype, op))

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> Way:
        """Return a prepared call that reduces over all ranks, in place."""
        place, lent, transport = self._memory.place_of(tensor), borrowed(tensor), self._transport
        makers: dict[str, Callable[[], Way]] = {
            name: partial(partial, module.all_reduce, transport, self._reducer, lent, op)
            for name, module in _REDUCING.items()
        }
        makers["mpi"] = lambda: self._scaled(transport.prepared_all_reduce(lent, carrier_op(op)), lent, op)
        makers |= self._in_node(lambda: self._node_all_reduce(place, lent, op))
        return self._make("all_reduce", algorithm, makers, place, tensor.nbytes, (tensor.dtype, op))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str) -> Way:
        """Return a prepared call that reduces over all ranks and stores this rank's share."""
        place, transport, memory = self._memory.place_of(tensor), self._transport, self._memory
        part, whole = borrowed(out), borrowed(tensor)
        makers: _Makers = {
            "mpi": lambda: self._scaled(transport.prepared_reduce_scatter(part, whole, carrier_op(op)), part, op),
            "direct": lambda: partial(direct.reduce_scatter, transport, self._reducer, part, whole, op),
            "ring": lambda: partial(ring.reduce_scatter, transport, self._reducer, part, whole, op),
            "recursive": lambda: partial(recursive.reduce_scatter, transport, self._reducer, part, whole, op),
            **self._in_node(
                lambda: memory.node.reduce_scatter(part, whole, op)
                if place == "window"
                else memory.node.staged.reduce_scatter(part, whole, op)
            ),
        }
        return self._make("reduce_scatter", algorithm, makers, place, tensor.nbytes, (tensor.dtype, op))

    def all_gather(self, out: Tensor, tensor: Tensor, algorithm: str) -> Way:
        """Return a prepared call that concatenates the tensors of all ranks."""
        place, transport, memory = self._memory.place_of(out), self._transport, self._memory
        whole, part = borrowed(out), borrowed(tensor)
        makers: _Makers = {
            "mpi": lambda: transport.prepared_all_gather(whole, part),
            "ring": lambda: partial(ring.all_gather, transport, whole, part),
            "recursive": lambda: partial(recursive.all_gather, transport, whole, part),
            **self._in_node(
                lambda: memory.node.all_gather(whole, part)
                if place == "window"
                else memory.node.staged.all_gather(whole, part)
            ),
        }
        if place == "window" and memory.node.is_common(out):
            # One tensor for all ranks of a node: with any other algorithm each of them would write
            # the whole tensor.
            algorithm = memory.algorithm if algorithm == "auto" else algorithm
        return self._make("all_gather", algorithm, makers, place, out.nbytes)

    # Implementation ---------------------------------------------------------------------------------------------------

    def _make(
        self,
        operation: str,
        algorithm: str,
        makers: _Makers,
        place: str,
        nbytes: int,
        reduced: tuple[torch.dtype, str] | None = None,
    ) -> Way:
        why_not = dict.fromkeys(makers, "")
        kind = "carried"
        if reduced is not None and not self._transport.reduces(reduced[0], carrier_op(reduced[1])):
            why_not["mpi"], kind = f"MPI does not reduce {reduced[0]} by {reduced[1]} as torch does", "own"
        for name in NODE_ALGORITHMS:
            if name in makers:
                why_not[name] = self._memory.why_not(name, operation, place)
        chosen = choose(operation, algorithm, why_not, self._tables, place=place, kind=kind, nbytes=nbytes)
        try:
            return makers[chosen]()
        except CommunicationError as error:
            if chosen not in NODE_ALGORITHMS or algorithm == chosen or not self._memory.lacks_space(error):
                raise
        why_not |= dict.fromkeys(NODE_ALGORITHMS, "there is no space for it in /dev/shm")
        return makers[choose(operation, algorithm, why_not, self._tables, place=place, kind=kind, nbytes=nbytes)]()

    def _in_node(self, make: Callable[[], Way]) -> dict[str, Callable[[], Way]]:
        return dict.fromkeys(NODE_ALGORITHMS, make)

    def _node_all_reduce(self, place: str, tensor: Tensor, op: str) -> Way:
        node = self._memory.node
        if place == "window":
            return node.all_reduce(tensor, op)
        return node.staged.all_reduce(tensor, op) if node.nodes == 1 else node.all_reduce_in_chunks(tensor, op)

    def _scaled(self, call: Way, tensor: Tensor, op: str, only: int | None = None) -> Way:
        """Return the call, followed by the scaling of an average."""
        scale = average_scale(op, self._transport.size)
        if scale is None or only not in (None, self._transport.rank):
            return call

        def way() -> None:
            call()
            tensor.mul_(scale)

        return way


_REDUCING: Mapping[str, Any] = {
    "direct": direct,
    "tree": tree,
    "ring": ring,
    "recursive": recursive,
    "double_tree": double_tree,
}


def borrowed(tensor: Tensor) -> Tensor:
    """Return a flat tensor of the same host memory that holds no reference to it."""
    from mpi4py import MPI

    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
