"""Dispatch of a communicator's tensors to the collectives of host or of GPU tensors, and the order of both."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.algorithms import direct, tree
from hpctrain.comm.prepared import CollectiveCall, FlatHostCollectives, as_flat_host
from hpctrain.comm.transport.base import Work
from hpctrain.comm.tuning.table import AlgorithmTable
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from hpctrain.comm.device.collectives import DeviceCollectives
    from hpctrain.comm.device.cuda_aware_probe import ProbeResult
    from hpctrain.comm.device.nccl_channel import NcclChannel


class HostCollectives:
    """Collectives and messages of any tensors in host memory, ordered with those on a GPU if there are any.

    Tensors with other strides or on other devices are copied. The methods are those of
    ``device.DeviceCollectives``.
    """

    def __init__(self, flat: FlatHostCollectives) -> None:
        self._flat = flat
        self.queue: OperationQueue | None = None

    def broadcast(self, tensor: Tensor, root: int, algorithm: str) -> None:
        """Copy the root's tensor to every rank, in place."""
        with self.ordered("broadcast"), as_flat_host(tensor) as host:
            self._flat.run(CollectiveCall("broadcast", host, root=root), algorithm)

    def reduce(self, tensor: Tensor, op: str, root: int, algorithm: str) -> None:
        """Reduce into the root's tensor; other ranks' tensors are unchanged."""
        with self.ordered("reduce"), as_flat_host(tensor) as host:
            self._flat.run(CollectiveCall("reduce", host, op=op, root=root), algorithm)

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> None:
        """Reduce over all ranks, in place."""
        with self.ordered("all_reduce"), as_flat_host(tensor) as host:
            self._flat.run(CollectiveCall("all_reduce", host, op=op), algorithm)

    def start_all_reduce(self, tensor: Tensor, op: str, algorithm: str) -> Work:
        """Start to reduce over all ranks, in place."""
        with self.ordered("all_reduce"), as_flat_host(tensor) as host:
            return self._registered(self._flat.start(CollectiveCall("all_reduce", host, op=op), algorithm))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str) -> None:
        """Reduce over all ranks and store this rank's share in ``out``."""
        with self.ordered("reduce_scatter"), as_flat_host(tensor, back=False) as host, as_flat_host(out) as share:
            self._flat.run(CollectiveCall("reduce_scatter", host, share, op), algorithm)

    def start_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str) -> Work:
        """Start to reduce over all ranks and store this rank's share in ``out``."""
        with self.ordered("reduce_scatter"), as_flat_host(tensor, back=False) as host, as_flat_host(out) as share:
            work = self._flat.start(CollectiveCall("reduce_scatter", host, share, op), algorithm)
            if share.data_ptr() != out.data_ptr():
                work.wait()  # the block's end copies the share back to ``out``, so the reduction must have completed
            return self._registered(work)

    def all_gather(self, out: Tensor, tensor: Tensor, algorithm: str) -> None:
        """Concatenate the tensors of all ranks in ``out``."""
        with self.ordered("all_gather"), as_flat_host(tensor, back=False) as host, as_flat_host(out) as whole:
            self._flat.run(CollectiveCall("all_gather", host, whole), algorithm)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Concatenate the tensors of all ranks on the root; only the root passes ``out``."""
        whole = tensor if out is None else out
        with self.ordered("gather"), as_flat_host(tensor, back=False) as host:
            with as_flat_host(whole, back=out is not None) as target:
                tree.gather(self._flat.transport, None if out is None else target, host, root)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> None:
        """Copy each rank's share of the root's tensor to ``out``; only the root passes ``tensor``."""
        whole = out if tensor is None else tensor
        with self.ordered("scatter"), as_flat_host(out) as share, as_flat_host(whole, back=False) as source:
            tree.scatter(self._flat.transport, share, None if tensor is None else source, root)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Send share r to rank r; store the received shares in rank order."""
        with self.ordered("all_to_all"), as_flat_host(tensor, back=False) as host, as_flat_host(out) as target:
            direct.all_to_all(self._flat.transport, target, host)

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Send to one rank."""
        with self.ordered("send"), as_flat_host(tensor, back=False) as host:
            self._flat.transport.send(host, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Receive from one rank."""
        with self.ordered("recv"), as_flat_host(tensor) as host:
            self._flat.transport.recv(host, peer, tag)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start to send to one rank."""
        with self.ordered("send"), as_flat_host(tensor, back=False) as host:
            return self._registered(self._flat.transport.isend(host, peer, tag))

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start to receive from one rank into a contiguous tensor."""
        with self.ordered("recv"):
            return self._registered(self._flat.transport.irecv(tensor.detach(), peer, tag))

    def ordered(self, operation: str) -> AbstractContextManager[object]:
        """Return the context of a host operation, which the queue orders with device operations."""
        return nullcontext() if self.queue is None else self.queue("host", operation)

    def _registered(self, work: Work) -> Work:
        """Register an operation in progress with the queue, so that later device operations can wait for it."""
        return work if self.queue is None else self.queue.register(work)


class Dispatch:
    """Choice between the collectives of host tensors and those of GPU tensors, which ``use_device`` creates."""

    def __init__(self, flat: FlatHostCollectives) -> None:
        self._flat = flat
        self.host = HostCollectives(flat)
        self.device: DeviceCollectives | None = None
        self.device_setup: tuple[torch.device, ProbeResult | None] | None = None

    def of(self, tensor: Tensor) -> HostCollectives | DeviceCollectives:
        """Return the collectives that serve a tensor."""
        if tensor.device.type not in ("cpu", "cuda"):
            raise CommunicationError(f"cannot send a tensor on {tensor.device}: allowed are tensors on cpu and cuda")
        return self.host if self.device is None or tensor.device.type == "cpu" else self.device

    def use_device(
        self, device: torch.device, verdict: ProbeResult | None, parent: Dispatch | None, table: AlgorithmTable | None
    ) -> None:
        """Set up the collectives of GPU tensors (see ``Communicator.use_device``). Collective.

        ``table`` holds the measured choice of paths for this device, if there is one.
        """
        from hpctrain.comm.device.collectives import DeviceCollectives, paths_of, transport_factory
        from hpctrain.comm.device.cuda_aware_probe import library_name
        from hpctrain.comm.device.nccl_channel import reason_unavailable
        from hpctrain.comm.device.paths import decide_cuda_awareness, gather_capabilities

        passed = verdict.cuda_aware if verdict is not None and verdict.holds_for(library_name()) else None
        transport = self._flat.transport
        capabilities = gather_capabilities(transport, device, decide_cuda_awareness(passed), reason_unavailable())
        self.host.queue = OperationQueue(None if parent is None else parent.host.queue)
        self.device = DeviceCollectives(
            self._flat,
            device,
            capabilities,
            transport_factory(transport, device),
            queue=self.host.queue,
            measured=paths_of(table),
        )
        self.device_setup = device, verdict

    def free(self) -> None:
        """Free the transports of the device. Collective."""
        if self.device is not None:
            self.device.free()


# Total order of operations across carriers (host, GPU), which prevents deadlocks between ranks ------------------------
#
# Note: why carriers need one order. All ranks start the same operations in the same order. However,
# an operation in progress may need its rank's host to progress (a window reduction, an exchange in
# rounds), and the host may be blocked in a wait for another carrier. Example: operation 1 is in
# progress on the host and operation 2 on the GPU. Rank 0 waits for operation 2 first, and thus does
# not progress operation 1. Rank 1 waits for operation 1 first, and has not started operation 2. Each
# rank waits for the other.
#
# Therefore a change of carrier is a synchronisation point. Before an operation starts on one carrier,
# all earlier operations of the other carrier are completed if they need the host, or enqueued on
# their stream otherwise. Then every rank can complete the first pending operation without any later
# one, and by induction all operations complete. Operations of the same carrier do not wait for each
# other.
#
# Communicators split from each other share the synchronisation point, because their ranks share a
# host. Each numbers its own operations, because only its own ranks number them identically. A lock
# extends these guarantees to operations that hooks start from other threads.


PRUNE = 64  # number of registered works beyond which finished ones are released


class _SharedOrder:
    """Operations in progress of all communicators of one process, and their current carrier."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.carrier = ""
        self.works: deque[Work] = deque()
        self.channels: list[NcclChannel] = []

    def change(self, carrier: str) -> None:
        """Synchronise before the first operation of another carrier: complete works and flush channels."""
        # Wait before removal: if a wait raises, the queue is unchanged.
        while self.works:
            self.works[0].wait()
            self.works.popleft()
        for channel in self.channels:
            channel.flush()
        self.carrier = carrier


class OperationQueue:
    """Sequence numbers of one communicator's operations, in program order.

    ``with queue("host", "all_reduce") as number:`` encloses the start of each operation.
    """

    def __init__(self, parent: OperationQueue | None = None) -> None:
        self._order: _SharedOrder = _SharedOrder() if parent is None else parent._order
        self.number = 0
        self.operation = ""

    def __call__(self, carrier: str, operation: str) -> OperationQueue:
        """Start an operation on a carrier: ``host``, ``mpi``, ``staged`` or ``nccl``; synchronise if it changes."""
        # MPI carries host operations, staging and device pointers alike, so these are one carrier
        # with one order.
        carrier = "nccl" if carrier == "nccl" else "host"
        order = self._order
        order.lock.acquire()
        try:
            if carrier != order.carrier:
                order.change(carrier)
        except BaseException:
            order.lock.release()
            raise
        self.number += 1
        self.operation = operation
        return self

    def __enter__(self) -> int:
        return self.number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._order.lock.release()

    def register(self, work: Work) -> Work:
        """Register a host operation that remains in progress; return it."""
        works = self._order.works
        while len(works) >= PRUNE and works[0].done():
            works.popleft()
        works.append(work)
        return work

    def register_channel(self, channel: NcclChannel) -> None:
        """Register a channel whose deferred messages must be enqueued on its stream before the host waits elsewhere."""
        self._order.channels.append(channel)

    def unregister_channel(self, channel: NcclChannel) -> None:
        """Unregister a closed channel."""
        self._order.channels.remove(channel)
