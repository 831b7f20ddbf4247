"""Collectives of tensors on a GPU, on the path that ``device.paths`` chooses.

Note: some NCCL reductions differ from torch. NCCL rounds 16-bit floats after every rank and drops
NaN from minimum and maximum. For these, the ranks exchange slices by NCCL. Each rank reduces its
own slice on the GPU, in rank order and with 16-bit floats in float32. Then the ranks exchange the
results. The volume is that of a ring, 2 S (p-1)/p, and the result has the same bits as on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpctrain.comm.algorithms import direct, tree
from hpctrain.comm.algorithms.base import slices
from hpctrain.comm.device.nccl import NcclTransport
from hpctrain.comm.device.nccl_channel import NcclChannel
from hpctrain.comm.device.paths import PATHS, Path, PathCapabilities, PathChoice, PathLog, choose_path
from hpctrain.comm.device.staging import PIECE_BYTES, StagedCopier, TensorParts, elementwise, gathered, scattered
from hpctrain.comm.device.streams import Streams, streams_of
from hpctrain.comm.prepared import CollectiveCall, as_flat_host
from hpctrain.comm.reduction import Reducer, average_scale, partial_dtype, transport_op
from hpctrain.comm.transport.base import Finished, Transport, Work
from hpctrain.comm.tuning.table import AlgorithmTable
from hpctrain.errors import CommunicationError

if TYPE_CHECKING:
    from hpctrain.comm.dispatch import OperationQueue
    from hpctrain.comm.prepared import FlatHostCollectives

_OnHost = Callable[[Tensor, Tensor], object]


class DeviceCollectives:
    """Collectives of the tensors on one device of this rank; construction is collective.

    ``host`` carries host tensors for staging. ``create`` creates the transport of a
    path ("nccl" or "mpi"). All transports are created at construction instead of at first use: the
    first use might be a message between two ranks, while creation needs all ranks. Operations
    complete in the order of the caller's stream.
    """

    def __init__(
        self,
        host: FlatHostCollectives,
        device: torch.device,
        capabilities: PathCapabilities,
        create: Callable[[Path], Transport],
        *,
        queue: OperationQueue,
        measured: Mapping[str, Sequence[tuple[float, Path]]] | None = None,
        streams: Streams | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._transport = host.transport
        self._host = host
        self._device = device
        self.capabilities = capabilities
        self._queue = queue
        self._measured = measured or {}
        self._piece_bytes = piece_bytes  # of a tensor that is staged
        self._copier = StagedCopier(streams or streams_of(device))
        self._reducer = Reducer()
        self._path_log = PathLog(host.transport.rank)
        unavailable: dict[Path, str] = {"nccl": capabilities.no_nccl, "mpi": capabilities.no_mpi}
        self._transports = {path: create(path) for path, reason in unavailable.items() if not reason}
        for channel in self._channels():
            queue.register_channel(channel)

    def broadcast(self, tensor: Tensor, root: int = 0, algorithm: str = "auto") -> None:
        """Copy the root's tensor to every rank, in place."""
        path = self._choose("broadcast", tensor, algorithm)
        with self._flat(tensor) as flat, self._queue(path, "broadcast"):
            if path != "staged":
                self._transports[path].broadcast(flat, root)
                return
            reads = self._transport.rank == root
            pieces = elementwise(flat, self._piece_bytes, read=reads, write=not reads)
            self._stage(
                pieces, lambda out, tensor: self._run("broadcast", tensor if reads else out, root=root), flat.dtype
            )

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str = "auto") -> None:
        """Reduce over all ranks, in place; the result is ready for later work on the caller's stream."""
        path = self._choose("all_reduce", tensor, algorithm, op)
        with self._flat(tensor) as flat, self._queue(path, "all_reduce"):
            if path == "staged":
                pieces = elementwise(flat, self._piece_bytes)
                self._stage(pieces, lambda out, _: self._run("all_reduce", out, op=op), flat.dtype)
            else:
                self._reduce_on_device(self._transports[path], flat, op)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str = "auto") -> None:
        """Reduce over all ranks into ``out``: share ``rank`` of the flat result."""
        path = self._choose("reduce_scatter", tensor, algorithm, op)
        with self._flat(tensor, back=False) as whole, self._flat(out) as part, self._queue(path, "reduce_scatter"):
            if path == "staged":
                pieces = scattered(part, whole, self._transport.size, self._piece_bytes)
                self._stage(pieces, lambda out, tensor: self._run("reduce_scatter", tensor, out, op=op), part.dtype)
            else:
                transport = self._transports[path]
                part.copy_(self._reduced_share(transport, whole, [part.numel()] * transport.size, op))

    def start_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str = "auto") -> Work:
        """Reduce as ``reduce_scatter``, which on a GPU is always asynchronous; return a finished ``Work``."""
        self.reduce_scatter(out, tensor, op, algorithm)
        return Finished()

    def all_gather(self, out: Tensor, tensor: Tensor, algorithm: str = "auto") -> None:
        """Concatenate the tensors of all ranks in ``out``."""
        path = self._choose("all_gather", tensor, algorithm)
        with self._flat(tensor, back=False) as part, self._flat(out) as whole, self._queue(path, "all_gather"):
            if path == "staged":
                pieces = gathered(whole, part, self._transport.size, self._piece_bytes)
                self._stage(pieces, lambda out, tensor: self._run("all_gather", tensor, out), part.dtype)
            else:
                self._transports[path].all_gather(whole, part)

    def reduce(self, tensor: Tensor, op: str, root: int, algorithm: str = "auto") -> None:
        """Reduce over all ranks into the root's tensor; other ranks' tensors are unchanged."""
        path = self._choose("reduce", tensor, algorithm, op)
        is_root = self._transport.rank == root
        with self._flat(tensor, back=is_root) as flat, self._queue(path, "reduce"):
            if path == "staged":
                pieces = elementwise(flat, self._piece_bytes, write=is_root)
                self._stage(pieces, lambda _, tensor: self._run("reduce", tensor, op=op, root=root), flat.dtype)
            elif self._transports[path].reduces(flat.dtype, op):
                self._transports[path].prepared_reduce(flat, op, root)()
            else:
                copy = flat.clone()
                self._reduce_on_device(self._transports[path], copy, op)
                if is_root:
                    flat.copy_(copy)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Concatenate the tensors of all ranks on the root; only the root passes ``out``."""
        path, whole = self._choose("gather", tensor, "auto"), tensor if out is None else out
        with self._flat(tensor, back=False) as part, self._flat(whole) as target, self._queue(path, "gather"):
            given = None if out is None else target
            if path == "staged":
                with as_flat_host(part, back=False) as host, as_flat_host(target, back=out is not None) as result:
                    tree.gather(self._transport, None if out is None else result, host, root)
            else:
                tree.gather(self._transports[path], given, part, root)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> None:
        """Copy each rank's share of the root's tensor to ``out``; only the root passes ``tensor``."""
        path, whole = self._choose("scatter", out, "auto"), out if tensor is None else tensor
        with self._flat(out) as part, self._flat(whole, back=False) as source, self._queue(path, "scatter"):
            if path == "staged":
                with as_flat_host(part) as host, as_flat_host(source, back=False) as given:
                    tree.scatter(self._transport, host, None if tensor is None else given, root)
            else:
                tree.scatter(self._transports[path], part, None if tensor is None else source, root)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Send share r to rank r; store the received shares in rank order."""
        path = self._choose("all_to_all", tensor, "auto")
        with self._flat(tensor, back=False) as source, self._flat(out) as target, self._queue(path, "all_to_all"):
            if path == "staged":
                with as_flat_host(source, back=False) as host, as_flat_host(target) as result:
                    direct.all_to_all(self._transport, result, host)
            else:
                shares = [source.numel() // self._transport.size] * self._transport.size
                self._transports[path].all_to_all(target, source, shares, shares)

    def start_all_reduce(self, tensor: Tensor, op: str, algorithm: str = "auto") -> Work:
        """Reduce as ``all_reduce``, which on a GPU is always asynchronous; return a finished ``Work``."""
        self.all_reduce(tensor, op, algorithm)
        return Finished()

    # A staged message is cut as the host's transport cuts it, because the peer's tensor may be in host memory.

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Send to one rank; a tag other than 0 needs a path that supports tags."""
        path = self._choose("send", tensor, "auto", tag=tag)
        with self._flat(tensor, back=False) as flat, self._queue(path, "send"):
            if path == "staged":
                pieces = elementwise(flat, self._transport.message_bytes, write=False)
                self._stage(pieces, lambda _, tensor: self._transport.send(tensor, peer, tag), flat.dtype)
            else:
                self._transports[path].send(flat, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Receive from one rank into a tensor of the size that was sent."""
        path = self._choose("send", tensor, "auto", tag=tag)
        with self._flat(tensor) as flat, self._queue(path, "recv"):
            if path == "staged":
                pieces = elementwise(flat, self._transport.message_bytes, read=False)
                self._stage(pieces, lambda out, _: self._transport.recv(out, peer, tag), flat.dtype)
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

    def _choose(self, operation: str, tensor: Tensor, algorithm: str, op: str = "", tag: int = 0) -> Path:
        if tensor.device != self._device:
            raise CommunicationError(
                f"{operation} of a tensor on {tensor.device}: this rank's tensors are on {self._device} or on the host"
            )
        nbytes = tensor.numel() * tensor.element_size()
        capabilities = self.capabilities
        if tag:
            capabilities = replace(capabilities, no_nccl="NCCL has no tags")
        choice: PathChoice = choose_path(
            operation,
            nbytes,
            capabilities,
            algorithm=algorithm,
            mpi_reduces=not op or self._transport.reduces(tensor.dtype, transport_op(op)),
            measured=self._measured.get(operation, ()),
        )
        self._path_log.log(choice)
        return choice.path

    def _channels(self) -> list[NcclChannel]:
        return [transport.channel for transport in self._transports.values() if isinstance(transport, NcclTransport)]

    def _reduce_on_device(self, transport: Transport, flat: Tensor, op: str) -> None:
        if transport.reduces(flat.dtype, op):
            transport.all_reduce(flat, op)
        elif transport.reduces(flat.dtype, transport_op(op)):
            transport.all_reduce(flat, transport_op(op))
            flat.mul_(average_scale(op, transport.size) or 1.0)
        else:
            counts = slices(flat.numel(), transport.size)
            own = self._reduced_share(transport, flat, counts, op)
            transport.all_to_all(flat, own.repeat(transport.size), [own.numel()] * transport.size, counts)

    def _reduced_share(self, transport: Transport, flat: Tensor, counts: Sequence[int], op: str) -> Tensor:
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

    def _run(self, operation: str, tensor: Tensor, out: Tensor | None = None, **options: Any) -> None:
        """Run a collective of host tensors."""
        self._host.run(CollectiveCall(operation, tensor, out, **options))

    def _stage(self, pieces: Sequence[TensorParts], operation: _OnHost, dtype: torch.dtype) -> None:
        def run(target: Tensor, source: Tensor) -> None:
            operation(target, source)

        self._copier.run(pieces, run, dtype)

    @contextmanager
    def _flat(self, tensor: Tensor, *, back: bool = True) -> Iterator[Tensor]:
        """Yield the tensor flat and contiguous; if that needed a copy, copy it ``back`` afterwards."""
        plain = tensor.detach()
        if plain.is_contiguous():
            yield plain.view(-1)
            return
        packed = plain.contiguous()
        yield packed.view(-1)
        if back:
            plain.copy_(packed)


def transport_factory(transport: Any, device: torch.device) -> Callable[[Path], Transport]:
    """Return a function that creates the transport of a path among the ranks of an MPI transport."""

    def create(path: Path) -> Transport:
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
