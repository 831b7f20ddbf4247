"""Dispatch of a communicator's operations: argument checks, collectives on host or GPU, and the order of both."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.comm.algorithms import direct, tree
from hpctrain.comm.prepared import CollectiveCall, FlatHostCollectives, as_flat
from hpctrain.comm.transport.base import TAGS, Finished, Work
from hpctrain.comm.tuning.table import AlgorithmTable
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from hpctrain.comm.device.collectives import DeviceCollectives
    from hpctrain.comm.device.cuda_aware_probe import ProbeResult
    from hpctrain.comm.device.nccl_channel import NcclChannel


USER_TAGS = TAGS - 3  # the last three tags are reserved for collectives, and for ranks that free a communicator


@dataclass(frozen=True)
class ArgumentChecks:
    """Argument checks on rank ``rank`` of ``size``; each method raises ``CommunicationError``."""

    rank: int
    size: int

    def check_root(self, root: int) -> None:
        """Refuse a root outside of the communicator."""
        if not 0 <= root < self.size:
            raise CommunicationError(f"rank {root} is not in 0..{self.size - 1}")

    def check_tag(self, tag: int) -> None:
        """Refuse a tag outside of the range for users."""
        if not 0 <= tag < USER_TAGS:
            raise CommunicationError(f"tag {tag} is not in 0..{USER_TAGS - 1}")

    def check_shares(self, share: Tensor, whole: Tensor) -> None:
        """Refuse a share whose dtype or size is not that of one of ``size`` equal shares of the whole."""
        if share.dtype != whole.dtype or share.numel() * self.size != whole.numel():
            raise CommunicationError(
                f"{whole.numel()} elements of {whole.dtype} are not {self.size} shares "
                f"of {share.numel()} elements of {share.dtype}"
            )

    def check_exchanged(self, out: Tensor, tensor: Tensor) -> None:
        """Refuse tensors that differ in size or dtype, or that do not divide into equal shares for all ranks."""
        if out.dtype != tensor.dtype or out.numel() != tensor.numel() or tensor.numel() % self.size:
            raise CommunicationError(
                f"all_to_all of {tensor.numel()} elements of {tensor.dtype} into {out.numel()} of {out.dtype}: "
                f"expected equal tensors that {self.size} ranks can share"
            )

    def only_on(self, root: int, whole: Tensor | None, name: str, share: Tensor) -> Tensor | None:
        """Return the tensor that only the root passes, after a check; return None on the other ranks."""
        self.check_root(root)
        if self.rank != root:
            return None
        if whole is None:
            raise CommunicationError(
                f"the root, rank {root}, needs {name}: {self.size} shares of {share.numel()} elements"
            )
        self.check_shares(share, whole)
        return whole


def check_contiguous(tensor: Tensor) -> None:
    """Refuse a non-contiguous tensor: an asynchronous receive cannot write into it."""
    if not tensor.is_contiguous():
        raise CommunicationError(f"irecv wants a contiguous tensor, not strides {tuple(tensor.stride())}; use recv")


# Collectives of host tensors ------------------------------------------------------------------------------------------

EXCHANGES: Mapping[str, Callable[..., object]] = {
    "gather": tree.gather,
    "scatter": tree.scatter,
    "all_to_all": direct.all_to_all,
}


_NOTHING, _FINISHED = nullcontext(), Finished()


class HostCollectives:
    """Collectives and messages of any tensors in host memory, ordered with those on a GPU if there are any.

    Tensors with other strides or on other devices are copied. The methods are those of
    ``device.DeviceCollectives``.
    """

    def __init__(self, flat: FlatHostCollectives) -> None:
        self.flat = flat
        self.queue: OperationQueue | None = None

    def run(
        self,
        operation: str,
        tensor: Tensor,
        out: Tensor | None = None,
        *,
        op: str = "",
        root: int | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
    ) -> Work:
        """Run a collective of ``ALGORITHMS``, in place if it has no ``out``; with ``async_op`` only start it."""
        share: AbstractContextManager[Any] = _NOTHING if out is None else as_flat(out)
        with self.ordered(), as_flat(tensor, back=out is None) as host, share as target:
            call = CollectiveCall(operation, host, target, op, root)
            if not async_op:
                self.flat.run(call, algorithm)
                return _FINISHED
            work = self.flat.start(call, algorithm)
            if out is not None and target.data_ptr() != out.data_ptr():
                work.wait()  # the block's end copies the share back to ``out``, so the reduction must have completed
            return self._registered(work)

    def exchange(self, operation: str, out: Tensor | None, tensor: Tensor | None, *root: int) -> None:
        """Run one of ``EXCHANGES``: ``out`` of a gather, and ``tensor`` of a scatter, are None but on the root."""
        with self.ordered(), as_flat(tensor, back=False) as source, as_flat(out) as target:
            EXCHANGES[operation](self.flat.transport, target, source, *root)

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        with self.ordered(), as_flat(tensor, back=False) as host:
            self.flat.message("send", host, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> None:
        with self.ordered(), as_flat(tensor) as host:
            self.flat.message("recv", host, peer, tag)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        with self.ordered(), as_flat(tensor, back=False) as host:
            return self._registered(self.flat.transport.isend(host, peer, tag))

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start to receive from one rank into a contiguous tensor."""
        with self.ordered():
            return self._registered(self.flat.transport.irecv(tensor.detach(), peer, tag))

    def ordered(self) -> AbstractContextManager[object]:
        """Return the context of a host operation, which the queue orders with device operations."""
        return _NOTHING if self.queue is None else self.queue("host")

    def _registered(self, work: Work) -> Work:
        """Register an operation in progress with the queue, so that later device operations can wait for it."""
        return work if self.queue is None else self.queue.register(work)


class Dispatch:
    """Choice between the collectives of host tensors and those of GPU tensors, which ``use_device`` creates."""

    def __init__(self, flat: FlatHostCollectives) -> None:
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

        passed = verdict.cuda_aware if verdict is not None and verdict.library == library_name() else None
        transport = self.host.flat.transport
        capabilities = gather_capabilities(transport, device, decide_cuda_awareness(passed), reason_unavailable())
        self.host.queue = OperationQueue() if parent is None else parent.host.queue
        create = transport_factory(transport, device)
        self.device = DeviceCollectives(self.host, device, capabilities, create, measured=paths_of(table))
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
# Communicators split from each other share one queue, because their ranks share a host. A lock extends
# these guarantees to operations that hooks start from other threads.


PRUNE = 64  # number of registered works beyond which finished ones are released


class OperationQueue:
    """Order of the operations of all communicators that were split from each other, in one process.

    ``with queue("host"):`` encloses the start of each operation.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._carrier = ""
        self._works: deque[Work] = deque()
        self._channels: list[NcclChannel] = []

    def __call__(self, carrier: str) -> OperationQueue:
        """Start an operation on a carrier: ``host``, ``mpi``, ``staged`` or ``nccl``; synchronise if it changes."""
        # MPI carries host operations, staging and device pointers alike, so these are one carrier
        # with one order.
        carrier = "nccl" if carrier == "nccl" else "host"
        self._lock.acquire()
        try:
            if carrier != self._carrier:
                self._change(carrier)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def _change(self, carrier: str) -> None:
        """Synchronise before the first operation of another carrier: complete works and flush channels."""
        # Wait before removal: if a wait raises, the queue is unchanged.
        while self._works:
            self._works[0].wait()
            self._works.popleft()
        for channel in self._channels:
            channel.flush()
        self._carrier = carrier

    def register(self, work: Work) -> Work:
        """Register a host operation that remains in progress; return it."""
        while len(self._works) >= PRUNE and self._works[0].done():
            self._works.popleft()
        self._works.append(work)
        return work

    def register_channel(self, channel: NcclChannel) -> None:
        """Register a channel whose deferred messages must be enqueued on its stream before the host waits elsewhere."""
        self._channels.append(channel)

    def unregister_channel(self, channel: NcclChannel) -> None:
        """Unregister a closed channel."""
        self._channels.remove(channel)
