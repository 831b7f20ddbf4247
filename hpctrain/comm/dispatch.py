"""Dispatch of a communicator's tensors: to the collectives of host tensors, or to those of this rank's device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.algorithms import pairwise, tree
from hpctrain.comm.ordering import OperationQueue
from hpctrain.comm.prepared import (
    ALGORITHMS,
    NODE_ALGORITHMS,
    CollectiveCall,
    HostContext,
    PreparedCallCache,
    as_flat_host,
    call_key,
    check_known,
)
from hpctrain.comm.reduction import Reducer, transport_op
from hpctrain.comm.shm.memory import SharedMemory
from hpctrain.comm.topology import Topology
from hpctrain.comm.transport.base import Finished, PreparedCall, Transport, Work
from hpctrain.comm.tuning.defaults import default_table
from hpctrain.comm.tuning.table import AlgorithmTable, RankLayout, choose
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from hpctrain.comm.device.collectives import DeviceCollectives
    from hpctrain.comm.device.cuda_aware_probe import ProbeResult


class FlatHostCollectives:
    """Collectives of flat, contiguous host tensors: each call is prepared once and cached.

    Shares of ``reduce_scatter`` and ``all_gather`` are equal.
    """

    def __init__(self, transport: Transport, node: Transport, topology: Topology) -> None:
        reducer = Reducer()
        self.transport = transport
        self.memory = SharedMemory(transport, node, topology, reducer)
        self.cache = PreparedCallCache()
        self._context = HostContext(transport, reducer, self.memory)
        self._layout = RankLayout(transport.size, topology.nodes, topology.local_size)
        self._default = default_table(self._layout, topology.oversubscribed)
        self._tables: tuple[AlgorithmTable, ...] = (self._default,)

    def use_tables(self, tables: Mapping[RankLayout, AlgorithmTable]) -> None:
        """Choose algorithms by measured tables, the same on all ranks; use the defaults for missing entries."""
        measured = tables.get(self._layout)
        self._tables = (self._default,) if measured is None else (measured, self._default)
        self.cache.clear()

    def empty(self, numel: int, dtype: torch.dtype, *, common: bool = False, must_share: bool = False) -> Tensor:
        """Return a flat tensor, in node memory if available. Collective."""
        self.cache.clear()  # the new tensor may reuse an address that was private memory on this rank only
        return self.memory.empty(numel, dtype, common=common, must_share=must_share)

    def run(self, call: CollectiveCall, algorithm: str = "auto") -> None:
        """Run a collective. Collective."""
        if self.transport.size == 1 or not call.tensor.numel():
            check_known(call.operation, algorithm)
            if call.out is not None:
                call.out.copy_(call.tensor)
            return
        key = call_key(call.operation, call.tensor, call.out, call.op, call.root, algorithm)
        prepared = self.cache.get(key)
        if prepared is None:
            prepared = self.cache[key] = self._prepare(call, algorithm)
        prepared()

    def start(self, call: CollectiveCall, algorithm: str = "auto") -> Work:
        """Start a reduction; only a reduction in node memory remains in progress on return. Collective."""
        key = call_key(f"start_{call.operation}", call.tensor, call.out, call.op, call.root, algorithm)
        prepared = self.cache.get(key)
        if prepared is None:
            if not self._remains_in_progress(call, algorithm):
                self.run(call, algorithm)
                return Finished()
            arguments = call.without_references().arguments
            prepared = self.cache[key] = self.memory.node.prepare_start(call.operation, arguments)
        work: Work = prepared() if call.out is None else prepared(call.out)
        return work

    def free(self) -> None:
        """Free node memory. Collective."""
        self.cache.clear()
        self.memory.free()

    def _prepare(self, call: CollectiveCall, algorithm: str) -> PreparedCall:
        """Select the algorithm and bind its arguments; use messages if /dev/shm has no space for node memory."""
        location = self.memory.location_of(call.whole)
        if call.operation == "all_gather" and location == "window" and self.memory.node.is_common(call.whole):
            # One tensor for all ranks of a node: with any other algorithm each of them would write
            # the whole tensor.
            algorithm = self.memory.algorithm if algorithm == "auto" else algorithm
        factories = ALGORITHMS[call.operation]
        unavailable, kind = dict.fromkeys(factories, ""), "carried"
        if call.op and not self.transport.reduces(call.tensor.dtype, transport_op(call.op)):
            unavailable["mpi"] = f"MPI does not reduce {call.tensor.dtype} by {call.op} as torch does"
            kind = "own"
        for name in set(NODE_ALGORITHMS) & set(factories):
            unavailable[name] = self.memory.why_unavailable(name, call.operation, location)
        select = partial(
            choose,
            call.operation,
            algorithm,
            tables=self._tables,
            location=location,
            kind=kind,
            nbytes=call.whole.nbytes,
        )
        chosen, unowned = select(unavailable), call.without_references()
        try:
            return factories[chosen](self._context, unowned)
        except CommunicationError as error:
            if chosen not in NODE_ALGORITHMS or algorithm == chosen or not self.memory.lacks_space(error):
                raise
        unavailable |= dict.fromkeys(NODE_ALGORITHMS, "there is no space for it in /dev/shm")
        return factories[select(unavailable)](self._context, unowned)

    def _remains_in_progress(self, call: CollectiveCall, algorithm: str) -> bool:
        if not call.tensor.numel() or self.memory.location_of(call.tensor) != "window":
            return False
        named = algorithm in NODE_ALGORITHMS and not self.memory.why_unavailable(algorithm, call.operation, "window")
        return algorithm == "auto" or named


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
            pairwise.all_to_all(self._flat.transport, target, host)

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
        from hpctrain.comm.device.paths import decide_cuda_awareness, gather_capabilities

        passed = verdict.cuda_aware if verdict is not None and verdict.holds_for(library_name()) else None
        transport = self._flat.transport
        capabilities = gather_capabilities(transport, device, decide_cuda_awareness(passed))
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
