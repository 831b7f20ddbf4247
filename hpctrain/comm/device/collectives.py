"""Collectives of tensors on a GPU, on the path that ``transport.device`` chooses.

Note: some NCCL reductions differ from torch. NCCL rounds 16-bit floats after every rank and drops
NaN from minimum and maximum. For these, the ranks exchange slices by NCCL. Each rank reduces its
own slice on the GPU, in rank order and with 16-bit floats in float32. Then the ranks exchange the
results. The volume is that of a ring, 2 S (p-1)/p, and the result has the same bits as on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.algorithms import tree
from hpctrain.comm.algorithms.direct import slices
from hpctrain.comm.device.nccl import NcclTransport
from hpctrain.comm.device.nccl_channel import NcclChannel
from hpctrain.comm.device.paths import PATHS, Abilities, Choice, Path, PathLog, choose_path
from hpctrain.comm.device.staging import PIECE_BYTES, StagedCopier
from hpctrain.comm.device.streams import Streams, streams_of
from hpctrain.comm.host_collectives import HostCollectives, hosted
from hpctrain.comm.ordering import OperationQueue
from hpctrain.comm.reduction import Reducer, average_scale, carrier_op, partial_dtype
from hpctrain.comm.transport.base import Finished, Transport, Work
from hpctrain.comm.transport.chunks import TensorParts, elementwise, gathered, scattered
from hpctrain.comm.tuning.table import AlgorithmTable
from hpctrain.errors import CommunicationError

_OnHost = Callable[[Tensor, Tensor], object]


class DeviceCollectives:
    """Collectives of the tensors on one device of this rank; construction is collective.

    ``transport`` and ``host`` carry host tensors for staging. ``make`` creates the transport of a
    path ("nccl" or "mpi"). All transports are created at construction instead of at first use: the
    first use might be a message between two ranks, while creation needs all ranks. Operations
    complete in the order of the caller's stream.
    """

    def __init__(
        self,
        transport: Transport,
        host: HostCollectives,
        device: torch.device,
        abilities: Abilities,
        make: Callable[[Path], Transport],
        *,
        queue: OperationQueue,
        measured: Mapping[str, Sequence[tuple[float, Path]]] | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._transport = transport
        self._host = host
        self._device = device
        self._abilities = abilities
        self._queue = queue
        self._measured = measured or {}
        self._copier = StagedCopier(streams or streams_of(device))
        self._reducer = Reducer()
        self._announcer = PathLog(transport.rank)
        able: list[Path] = [path for path, why in _hindrances(abilities).items() if not why]
        self._carriers = {path: make(path) for path in able}
        for channel in self._channels():
            queue.adopt(channel)

    def broadcast(self, tensor: Tensor, root: int = 0, algorithm: str = "auto") -> None:
        """Copy the root's tensor to every rank, in place."""
        path = self._choose("broadcast", tensor, algorithm)
        with self._flat(tensor) as flat, self._queue(path, "broadcast"):
            if path != "staged":
                self._carriers[path].broadcast(flat, root)
                return
            reads = self._transport.rank == root
            pieces = elementwise(flat, PIECE_BYTES, read=reads, write=not reads)
            self._stage(pieces, lambda out, tensor: self._host.broadcast(tensor if reads else out, root), flat.dtype)

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str = "auto") -> None:
        """Reduce over all ranks, in place; the result is ready for later work on the caller's stream."""
        path = self._choose("all_reduce", tensor, algorithm, op)
        with self._flat(tensor) as flat, self._queue(path, "all_reduce"):
            if path == "staged":
                pieces = elementwise(flat, PIECE_BYTES)
                self._stage(pieces, lambda out, _: self._host.all_reduce(out, op), flat.dtype)
            else:
                self._reduce_on_device(self._carriers[path], flat, op)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str = "auto") -> None:
        """Reduce over all ranks into ``out``: share ``rank`` of the flat result."""
        path = self._choose("reduce_scatter", tensor, algorithm, op)
        with self._flat(tensor, back=False) as whole, self._flat(out) as part, self._queue(path, "reduce_scatter"):
            if path == "staged":
                pieces = scattered(part, whole, self._transport.size, PIECE_BYTES)
                self._stage(pieces, lambda out, tensor: self._host.reduce_scatter(out, tensor, op), part.dtype)
            else:
                carrier = self._carriers[path]
                part.copy_(self._reduced_share(carrier, whole, [part.numel()] * carrier.size, op))

    def start_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str = "auto") -> Work:
        """Reduce as ``reduce_scatter``, which on a GPU is always asynchronous; return a finished ``Work``."""
        self.reduce_scatter(out, tensor, op, algorithm)
        return Finished()

    def all_gather(self, out: Tensor, tensor: Tensor, algorithm: str = "auto") -> None:
        """Concatenate the tensors of all ranks in ``out``."""
        path = self._choose("all_gather", tensor, algorithm)
        with self._flat(tensor, back=False) as part, self._flat(out) as whole, self._queue(path, "all_gather"):
            if path == "staged":
                pieces = gathered(whole, part, self._transport.size, PIECE_BYTES)
                self._stage(pieces, lambda out, tensor: self._host.all_gather(out, tensor), part.dtype)
            else:
                self._carriers[path].all_gather(whole, part)

    def reduce(self, tensor: Tensor, op: str, root: int, algorithm: str = "auto") -> None:
        """Reduce over all ranks into the root's tensor; other ranks' tensors are unchanged."""
        path = self._choose("reduce", tensor, algorithm, op)
        mine = self._transport.rank == root
        with self._flat(tensor, back=mine) as flat, self._queue(path, "reduce"):
            if path == "staged":
                pieces = elementwise(flat, PIECE_BYTES, write=mine)
                self._stage(pieces, lambda _, tensor: self._host.reduce(tensor, op, root), flat.dtype)
            elif self._carriers[path].reduces(flat.dtype, op):
                self._carriers[path].prepared_reduce(flat, op, root)()
            else:
                copy = flat.clone()
                self._reduce_on_device(self._carriers[path], copy, op)
                if mine:
                    flat.copy_(copy)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Concatenate the tensors of all ranks on the root; only the root passes ``out``."""
        path, whole = self._choose("gather", tensor, "auto"), tensor if out is None else out
        with self._flat(tensor, back=False) as part, self._flat(whole) as target, self._queue(path, "gather"):
            given = None if out is None else target
            if path == "staged":
                with hosted(part, back=False) as host, hosted(target, back=out is not None) as room:
                    self._host.gather(None if out is None else room, host, root)
            else:
                tree.gather(self._carriers[path], given, part, root)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> None:
        """Copy each rank's share of the root's tensor to ``out``; only the root passes ``tensor``."""
        path, whole = self._choose("scatter", out, "auto"), out if tensor is None else tensor
        with self._flat(out) as part, self._flat(whole, back=False) as source, self._queue(path, "scatter"):
            if path == "staged":
                with hosted(part) as host, hosted(source, back=False) as room:
                    self._host.scatter(host, None if tensor is None else room, root)
            else:
                tree.scatter(self._carriers[path], part, None if tensor is None else source, root)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Send share r to rank r; store the received shares in rank order."""
        path = self._choose("all_to_all", tensor, "auto")
        with self._flat(tensor, back=False) as source, self._flat(out) as target, self._queue(path, "all_to_all"):
            if path == "staged":
                with hosted(source, back=False) as host, hosted(target) as room:
                    self._host.all_to_all(room, host)
            else:
                shares = [source.numel() // self._transport.size] * self._transport.size
                self._carriers[path].all_to_all(target, source, shares, shares)

    def start_all_reduce(self, tensor: Tensor, op: str, algorithm: str = "auto") -> Work:
        """Reduce as ``all_reduce``, which on a GPU is always asynchronous; return a finished ``Work``."""
        self.all_reduce(tensor, op, algorithm)
        return Finished()

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Send to one rank; a tag other than 0 needs a path that supports tags."""
        path = self._choose("send", tensor, "auto", tag=tag)
        with self._flat(tensor, back=False) as flat, self._queue(path, "send"):
            if path == "staged":
                pieces = elementwise(flat, _message_bytes(), write=False)
                self._stage(pieces, lambda _, tensor: self._transport.send(tensor, peer, tag), flat.dtype)
            else:
                self._carriers[path].send(flat, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Receive from one rank into a tensor of the size that was sent."""
        path = self._choose("send", tensor, "auto", tag=tag)
        with self._flat(tensor) as flat, self._queue(path, "recv"):
            if path == "staged":
                pieces = elementwise(flat, _message_bytes(), read=False)
                self._stage(pieces, lambda out, _: self._transport.recv(out, peer, tag), flat.dtype)
            else:
                self._carriers[path].recv(flat, peer, tag)

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
            self._queue.forget(channel)
        for carrier in self._carriers.values():
            carrier.free()
        self._carriers.clear()

    # Implementation ---------------------------------------------------------------------------------------------------

    def _choose(self, operation: str, tensor: Tensor, algorithm: str, op: str = "", tag: int = 0) -> Path:
        if tensor.device != self._device:
            raise CommunicationError(
                f"{operation} of a tensor on {tensor.device}: this rank's tensors are on {self._device} or on the host"
            )
        nbytes = tensor.numel() * tensor.element_size()
        abilities = self._abilities
        if tag:
            abilities = Abilities("NCCL has no tags", abilities.no_mpi, abilities.ranks_per_gpu, abilities.mpi_reason)
        choice: Choice = choose_path(
            operation,
            nbytes,
            abilities,
            algorithm=algorithm,
            mpi_reduces=not op or self._transport.reduces(tensor.dtype, carrier_op(op)),
            measured=self._measured.get(operation, ()),
        )
        self._announcer.say(choice)
        return choice.path

    def _channels(self) -> list[NcclChannel]:
        return [carrier.channel for carrier in self._carriers.values() if isinstance(carrier, NcclTransport)]

    def _reduce_on_device(self, carrier: Transport, flat: Tensor, op: str) -> None:
        if carrier.reduces(flat.dtype, op):
            carrier.all_reduce(flat, op)
        elif carrier.reduces(flat.dtype, carrier_op(op)):
            carrier.all_reduce(flat, carrier_op(op))
            flat.mul_(average_scale(op, carrier.size) or 1.0)
        else:
            counts = slices(flat.numel(), carrier.size)
            own = self._reduced_share(carrier, flat, counts, op)
            carrier.all_to_all(flat, own.repeat(carrier.size), [own.numel()] * carrier.size, counts)

    def _reduced_share(self, carrier: Transport, flat: Tensor, counts: Sequence[int], op: str) -> Tensor:
        """Return this rank's slice of the reduction: fetch the slices of all ranks, then reduce in rank order."""
        own = counts[carrier.rank]
        received = flat.new_empty(own * carrier.size)
        carrier.all_to_all(received, flat, counts, [own] * carrier.size)
        first, *rest = received.view(carrier.size, own).unbind()
        wide = partial_dtype(flat.dtype, op)
        total = first.to(wide, copy=True)
        for piece in rest:
            self._reducer.combine(total, total, piece.to(wide), op)
        scale = average_scale(op, carrier.size)
        return (total if scale is None else total.mul_(scale)).to(flat.dtype)

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


def _hindrances(abilities: Abilities) -> dict[Path, str]:
    return {"nccl": abilities.no_nccl, "mpi": abilities.no_mpi}


def maker(transport: Any, device: torch.device) -> Callable[[Path], Transport]:
    """Return a function that creates the transport of a path among the ranks of an MPI transport."""

    def make(path: Path) -> Transport:
        if path == "nccl":
            return NcclTransport(transport, device)
        from hpctrain.comm.device.cuda_mpi import CudaMpiTransport

        return CudaMpiTransport(transport.comm, device)

    return make


def paths_of(table: AlgorithmTable | None) -> dict[str, Sequence[tuple[float, Path]]]:
    """Return the calibrated paths of GPU tensors: per operation, pairs of (upper limit in bytes, best path)."""
    rules = {} if table is None else table.rules
    return {
        operation: [(limit, path) for limit, name in steps for path in PATHS if path == name]
        for (operation, place, kind), steps in rules.items()
        if place == "cuda" and kind == "carried"
    }


def _message_bytes() -> int:
    # A staged message must be cut as MPI's transport cuts it, because the peer's tensor may be in
    # host memory.
    from hpctrain.comm.transport.mpi_calls import MESSAGE_BYTES

    return MESSAGE_BYTES
