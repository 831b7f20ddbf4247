"""Collectives of tensors on a GPU, on the path that ``device.paths`` chooses.

Note: some NCCL reductions differ from torch. NCCL rounds 16-bit floats after every rank and drops
NaN from minimum and maximum. For these, the ranks exchange slices by NCCL. Each rank reduces its
own slice on the GPU, in rank order and with 16-bit floats in float32. Then the ranks exchange the
results. The volume is that of a ring, 2 S (p-1)/p, and the result has the same bits as on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.comm.algorithms import tree
from hpctrain.comm.algorithms.base import slices
from hpctrain.comm.device.nccl import NcclTransport
from hpctrain.comm.device.nccl_channel import NcclChannel
from hpctrain.comm.device.paths import PATHS, Path, PathCapabilities, choose_path
from hpctrain.comm.device.staging import PIECE_BYTES, StagedCopier, elementwise, in_shares
from hpctrain.comm.device.streams import Streams, streams_of
from hpctrain.comm.prepared import CollectiveCall, as_flat
from hpctrain.comm.reduction import Reducer, average_scale, partial_dtype, transport_op
from hpctrain.comm.transport.base import Finished, TensorTransport, Work
from hpctrain.comm.tuning.table import AlgorithmTable
from hpctrain.errors import CommunicationError
from hpctrain.log import logger

if TYPE_CHECKING:
    from hpctrain.comm.dispatch import HostCollectives

_CARRIERS = {"nccl": "by NCCL", "mpi": "by MPI with device pointers", "staged": "through host memory"}


class DeviceCollectives:
    """Collectives of the tensors on one device of this rank; construction is collective.

    ``host`` carries host tensors for staging; its queue orders the operations of both. ``create``
    creates the transport of a path ("nccl" or "mpi"). All transports are created at construction
    instead of at first use: the first use might be a message between two ranks, while creation
    needs all ranks. Operations are asynchronous, and complete in the order of the caller's stream:
    their handles have always finished.
    """

    def __init__(
        self,
        host: HostCollectives,
        device: torch.device,
        capabilities: PathCapabilities,
        create: Callable[[Path], TensorTransport],
        *,
        measured: Mapping[str, Sequence[tuple[float, Path]]] | None = None,
        streams: Streams | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        assert host.queue is not None, "the caller orders operations of host and device"
        self._host = host
        self._transport = host.flat.transport
        self._queue = host.queue
        self._device = device
        self.capabilities = capabilities
        self._measured = measured or {}
        self._piece_bytes = piece_bytes  # of a tensor that is staged
        self._copier = StagedCopier(streams or streams_of(device))
        self._reducer = Reducer()
        self._logged: set[Path] = set()
        unavailable: dict[Path, str] = {"nccl": capabilities.no_nccl, "mpi": capabilities.no_mpi}
        self._transports = {path: create(path) for path, reason in unavailable.items() if not reason}
        for channel in self._channels():
            self._queue.register_channel(channel)

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
        """Run a collective, in place if it has no ``out``; the result is ready for the caller's stream."""
        path = self._choose(operation, tensor, algorithm, op)
        with self._flat(tensor, back=out is None) as flat, self._flat(out) as result, self._queue(path):
            call = CollectiveCall(operation, flat, result, op, root)
            if path == "staged":
                self._run_staged(call)
            else:
                self._run_on_device(self._transports[path], call)
        return Finished()

    def exchange(self, operation: str, out: Tensor | None, tensor: Tensor | None, *root: int) -> None:
        """Run a gather or scatter, of which only the root passes ``out`` or ``tensor``, or an all_to_all."""
        share = out if operation == "scatter" else tensor
        assert share is not None, "every rank has its own share"
        path = self._choose(operation, share)
        if path == "staged":
            self._host.exchange(operation, out, tensor, *root)
            return
        transport = self._transports[path]
        with self._flat(tensor, back=False) as source, self._flat(out) as target, self._queue(path):
            if operation == "all_to_all":
                shares = [source.numel() // transport.size] * transport.size
                transport.all_to_all(target, source, shares, shares)
            elif operation == "gather":
                tree.gather(transport, target, source, *root)
            else:
                tree.scatter(transport, target, source, *root)

    # A staged message is cut as the host's transport cuts it, because the peer's tensor may be in host memory.

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Send to one rank; a tag other than 0 needs a path that supports tags."""
        path = self._choose("send", tensor, tag=tag)
        with self._flat(tensor, back=False) as flat, self._queue(path):
            if path == "staged":
                pieces = elementwise(flat, self._transport.message_bytes, write=False)
                self._copier.run(pieces, lambda _, source: self._transport.send(source, peer, tag), flat.dtype)
            else:
                self._transports[path].send(flat, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Receive from one rank into a tensor of the size that was sent."""
        path = self._choose("send", tensor, tag=tag)
        with self._flat(tensor) as flat, self._queue(path):
            if path == "staged":
                pieces = elementwise(flat, self._transport.message_bytes, read=False)
                self._copier.run(pieces, lambda target, _: self._transport.recv(target, peer, tag), flat.dtype)
            else:
                self._transports[path].recv(flat, peer, tag)

    def isend(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Send to one rank; later work on the caller's stream may overwrite the tensor."""
        self.send(tensor, peer, tag)
        return Finished()

    def irecv(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Receive from one rank."""
        self.recv(tensor, peer, tag)
        return Finished()

    def free(self) -> None:
        """Free the transports of the paths. Collective."""
        for channel in self._channels():
            self._queue.unregister_channel(channel)
        for transport in self._transports.values():
            transport.free()
        self._transports.clear()

    # Implementation ---------------------------------------------------------------------------------------------------

    def _choose(self, operation: str, tensor: Tensor, algorithm: str = "auto", op: str = "", tag: int = 0) -> Path:
        """Return the path of an operation; log each path at its first use, so that a slow one is visible."""
        if tensor.device != self._device:
            raise CommunicationError(
                f"{operation} of a tensor on {tensor.device}: this rank's tensors are on {self._device} or on the host"
            )
        path, reason = choose_path(
            operation,
            tensor.nbytes,
            replace(self.capabilities, no_nccl="NCCL has no tags") if tag else self.capabilities,
            algorithm=algorithm,
            mpi_reduces=not op or self._transport.reduces(tensor.dtype, transport_op(op)),
            measured=self._measured.get(operation, ()),
        )
        if path not in self._logged:
            self._logged.add(path)
            if self._transport.rank == 0:
                logger.info("tensors on the GPU travel %s: %s", _CARRIERS[path], reason)
        return path

    def _channels(self) -> list[NcclChannel]:
        return [transport.channel for transport in self._transports.values() if isinstance(transport, NcclTransport)]

    def _run_staged(self, call: CollectiveCall) -> None:
        """Run a collective through host memory, piece by piece."""
        size, nbytes, is_root = self._transport.size, self._piece_bytes, call.root in (None, self._transport.rank)
        reads = is_root or call.operation != "broadcast"
        if call.out is None:
            writes = is_root if call.operation != "broadcast" else not is_root
            pieces = elementwise(call.tensor, nbytes, read=reads, write=writes)
        else:
            pieces = in_shares(call.out, call.tensor, size, nbytes)

        def on_host(target: Tensor, source: Tensor) -> None:
            result = None if call.out is None else target
            self._host.flat.run(replace(call, tensor=source if reads else target, out=result))

        self._copier.run(pieces, on_host, call.tensor.dtype)

    def _run_on_device(self, transport: TensorTransport, call: CollectiveCall) -> None:
        flat, out, op, root = call.tensor, call.out, call.op, call.root
        if out is not None:
            if call.operation == "all_gather":
                transport.all_gather(out, flat)
            else:
                out.copy_(self._reduced_share(transport, flat, [out.numel()] * transport.size, op))
        elif root is None:
            self._all_reduce(transport, flat, op)
        elif call.operation == "broadcast":
            transport.broadcast(flat, root)
        elif transport.reduces(flat.dtype, op):
            transport.prepared_reduce(flat, op, root)()
        else:
            copy = flat.clone()
            self._all_reduce(transport, copy, op)
            if transport.rank == root:
                flat.copy_(copy)

    def _all_reduce(self, transport: TensorTransport, flat: Tensor, op: str) -> None:
        if transport.reduces(flat.dtype, op):
            transport.all_reduce(flat, op)
        elif transport.reduces(flat.dtype, transport_op(op)):
            transport.all_reduce(flat, transport_op(op))
            flat.mul_(average_scale(op, transport.size) or 1.0)
        else:
            counts = slices(flat.numel(), transport.size)
            own = self._reduced_share(transport, flat, counts, op)
            transport.all_to_all(flat, own.repeat(transport.size), [own.numel()] * transport.size, counts)

    def _reduced_share(self, transport: TensorTransport, flat: Tensor, counts: Sequence[int], op: str) -> Tensor:
        """Return this rank's slice of the reduction: fetch the slices of all ranks, then reduce in rank order."""
        own = counts[transport.rank]
        received = flat.new_empty(own * transport.size)
        transport.all_to_all(received, flat, counts, [own] * transport.size)
        first, *rest = received.view(transport.size, own).unbind()
        wide = partial_dtype(flat.dtype, op)
        total = first.to(wide, copy=True)
        for piece in rest:
            self._reducer.combine(total, total, piece.to(wide), op)
        scale = average_scale(op, transport.size)
        return (total if scale is None else total.mul_(scale)).to(flat.dtype)

    def _flat(self, tensor: Tensor | None, *, back: bool = True) -> AbstractContextManager[Any]:
        return as_flat(tensor, back=back, on=self._device)


def transport_factory(transport: Any, device: torch.device) -> Callable[[Path], TensorTransport]:
    """Return a function that creates the transport of a path among the ranks of an MPI transport."""

    def create(path: Path) -> TensorTransport:
        if path == "nccl":
            return NcclTransport(transport, device)
        from hpctrain.comm.device.cuda_mpi import CudaMpiTransport

        return CudaMpiTransport(transport.comm, device)

    return create


def paths_of(table: AlgorithmTable | None) -> dict[str, Sequence[tuple[float, Path]]]:
    """Return the calibrated paths of GPU tensors: per operation, pairs of (upper limit in bytes, best path)."""
    rules = {} if table is None else table.rules
    return {
        operation: [(limit, path) for limit, name in steps for path in PATHS if path == name]
        for (operation, place, kind), steps in rules.items()
        if place == "cuda" and kind == "carried"
    }
