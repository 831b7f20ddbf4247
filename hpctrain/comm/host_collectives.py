"""Collectives of tensors in host memory; those with other strides or on other devices are copied."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpctrain.comm.algorithms import pairwise, tree
from hpctrain.comm.ordering import OperationQueue
from hpctrain.comm.prepared import NODE_ALGORITHMS, PreparedCalls, borrowed
from hpctrain.comm.reduction import Reducer
from hpctrain.comm.shm.memory import SharedMemory
from hpctrain.comm.topology import Topology
from hpctrain.comm.transport.base import Finished, Transport, Work
from hpctrain.comm.tuning.selection import check_known
from hpctrain.comm.tuning.table import AlgorithmTable, RankLayout


@contextmanager
def hosted(tensor: Tensor, *, back: bool = True) -> Iterator[Tensor]:
    """Yield a flat, contiguous host tensor of the same content; copy it ``back`` afterwards if it is a copy."""
    host = tensor.detach()
    if host.device.type == "cpu" and host.is_contiguous():
        yield host.view(-1)
        return
    host = host.contiguous().cpu()
    yield host.view(-1)
    if back:
        tensor.detach().copy_(host)


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
        self._ways = PreparedCalls(transport, reducer, self.memory)
        self.kept: dict[Hashable, Callable[..., Any]] = {}  # by operation, addresses, sizes, dtype, and options

    def use_tables(self, tables: Mapping[RankLayout, AlgorithmTable]) -> None:
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


class FlatHostCollectives:
    """Collectives and messages of any tensors in host memory, ordered with those on a GPU if there are any.

    The methods are those of ``device.DeviceCollectives``.
    """

    def __init__(self, host: HostCollectives) -> None:
        self._host = host
        self.queue: OperationQueue | None = None

    def broadcast(self, tensor: Tensor, root: int, algorithm: str) -> None:
        """Copy the root's tensor to every rank, in place."""
        with self.turn("broadcast"), hosted(tensor) as host:
            self._host.broadcast(host, root, algorithm)

    def reduce(self, tensor: Tensor, op: str, root: int, algorithm: str) -> None:
        """Reduce into the root's tensor; other ranks' tensors are unchanged."""
        with self.turn("reduce"), hosted(tensor) as host:
            self._host.reduce(host, op, root, algorithm)

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        """Reduce over all ranks, in place."""
        with self.turn("all_reduce"), hosted(tensor) as host:
            self._host.all_reduce(host, op, algorithm)

    def start_all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> Work:
        """Start to reduce over all ranks, in place."""
        with self.turn("all_reduce"), hosted(tensor) as host:
            return self.held(self._host.start_all_reduce(host, op, algorithm))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str) -> None:
        """Reduce over all ranks and store this rank's share in ``out``."""
        with self.turn("reduce_scatter"), hosted(tensor, back=False) as host, hosted(out) as part:
            self._host.reduce_scatter(part, host, op, algorithm)

    def start_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str) -> Work:
        """Start to reduce over all ranks and store this rank's share in ``out``."""
        with self.turn("reduce_scatter"), hosted(tensor, back=False) as host, hosted(out) as part:
            work = self._host.start_reduce_scatter(part, host, op, algorithm)
            if part.data_ptr() != out.data_ptr():
                work.wait()  # the block's end copies the part back to ``out``, so the reduction must have completed
            return self.held(work)

    def all_gather(self, out: Tensor, tensor: Tensor, algorithm: str) -> None:
        """Concatenate the tensors of all ranks in ``out``."""
        with self.turn("all_gather"), hosted(tensor, back=False) as host, hosted(out) as whole:
            self._host.all_gather(whole, host, algorithm)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Concatenate the tensors of all ranks on the root; only the root passes ``out``."""
        room = tensor if out is None else out
        with self.turn("gather"), hosted(tensor, back=False) as host, hosted(room, back=out is not None) as target:
            self._host.gather(None if out is None else target, host, root)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> None:
        """Copy each rank's share of the root's tensor to ``out``; only the root passes ``tensor``."""
        given = out if tensor is None else tensor
        with self.turn("scatter"), hosted(out) as part, hosted(given, back=False) as source:
            self._host.scatter(part, None if tensor is None else source, root)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Send share r to rank r; store the received shares in rank order."""
        with self.turn("all_to_all"), hosted(tensor, back=False) as host, hosted(out) as target:
            self._host.all_to_all(target, host)

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Send to one rank."""
        with self.turn("send"), hosted(tensor, back=False) as host:
            self._host.transport.send(host, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Receive from one rank."""
        with self.turn("recv"), hosted(tensor) as host:
            self._host.transport.recv(host, peer, tag)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start to send to one rank."""
        with self.turn("send"), hosted(tensor, back=False) as host:
            return self.held(self._host.transport.isend(host, peer, tag))

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start to receive from one rank into a contiguous tensor."""
        with self.turn("recv"):
            return self.held(self._host.transport.irecv(tensor.detach(), peer, tag))

    def turn(self, operation: str) -> AbstractContextManager[object]:
        """Return the context of a host operation, which the queue orders with device operations."""
        return nullcontext() if self.queue is None else self.queue("host", operation)

    def held(self, work: Work) -> Work:
        """Register an operation in progress with the queue, so that later device operations can wait for it."""
        return work if self.queue is None else self.queue.hold(work)
