"""Collectives of any tensors in host memory; tensors with other strides or on other devices are copied."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from hpctrain.collectives.host import HostCollectives
from hpctrain.collectives.lend import hosted
from hpctrain.collectives.queue import OperationQueue
from hpctrain.transport.base import Work


class HostedCollectives:
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
