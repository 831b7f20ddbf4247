"""Carry host tensors by mpi4py, in messages that the MPI libraries handle well."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.errors import CommunicationError
from hpctrain.transport.activity import waiting
from hpctrain.transport.base import TAGS, Chain, Transport, Work

# Both MPI libraries lose a factor of two on messages above 32 MiB: they allocate temporaries of the message's size,
# and glibc maps and unmaps anything that large on every call.
MESSAGE_BYTES = 16 * 2**20

# 16-bit floats MPI does not know, or not in every library; sums of 8- and 16-bit integers end at the largest number in
# Open MPI's vector code, and wrap around elsewhere.
DTYPES = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
}
OPS = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}


class MpiTransport(Transport):
    """Carry tensors over a communicator of its own, duplicated from the one given."""

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank = self.comm.Get_rank()
        self.size = self.comm.Get_size()

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Tell whether MPI reduces this dtype as torch does; its minimum and maximum may drop NaN, so those do not."""
        return dtype in DTYPES and op in OPS and not (dtype.is_floating_point and op in ("min", "max"))

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return every rank's object, pickled on the way."""
        with waiting("all_gather_object"):
            return self.comm.allgather(item)

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """Return the root's object, pickled on the way."""
        with waiting("broadcast_object"):
            return self.comm.bcast(item, root)

    def split(self, color: int, key: int) -> Transport:
        """Return a transport among the ranks of the same color, ordered by key."""
        return _adopt(self.comm.Split(color, key))

    def split_node(self) -> MpiTransport:
        """Return a transport among the ranks that can share memory with this one."""
        return _adopt(self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank))

    def abort(self, code: int) -> None:
        """End the whole job now: every rank of the world, not only of this communicator."""
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(code)

    def free(self) -> None:
        """Give the communicator back; a call by all of its ranks."""
        self.comm.Free()

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        pieces = _pieces(tensor)
        return _Requests("send", [self.comm.Isend(piece, peer, tag) for piece in pieces], tensor)

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        pieces = _pieces(tensor)
        return _Requests("recv", [self.comm.Irecv(piece, peer, tag) for piece in pieces], tensor)

    def _barrier(self) -> None:
        self.comm.Barrier()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        for piece in _pieces(tensor):
            self.comm.Bcast(piece, root)

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        if not self.reduces(tensor.dtype, op):
            raise CommunicationError(f"MPI does not reduce {tensor.dtype} by {op}; use algorithm direct or auto")
        flat, step = tensor.view(-1), MESSAGE_BYTES // tensor.element_size()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            self.comm.Allreduce(MPI.IN_PLACE, [_bytes(piece), piece.numel(), DTYPES[tensor.dtype]], OPS[op])

    def _all_gather(self, out: Tensor, tensor: Tensor) -> None:
        shares = out.view(-1).chunk(self.size)
        shares[self.rank].copy_(tensor.view(-1))
        if tensor.numel() * tensor.element_size() <= MESSAGE_BYTES:
            self.comm.Allgather(MPI.IN_PLACE, [_bytes(out), MPI.BYTE])
            return
        # A gather cannot be cut without strided receives; past the limit the ranks send their pieces one by one.
        for root, share in enumerate(shares):
            self._broadcast(share, root)

    def _iall_to_all(self, out: Tensor, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Work:
        outgoing, incoming = torch.split(tensor.view(-1), list(sent)), torch.split(out.view(-1), list(received))
        incoming[self.rank].copy_(outgoing[self.rank])
        return Chain(self._rounds(incoming, outgoing))

    def _rounds(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]) -> Iterator[Work]:
        # Everybody's partner in round k is k ranks away, so that no rank is written to by all the others at once.
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            arriving = self._irecv(incoming[source], source, TAGS)
            yield self._isend(outgoing[to], to, TAGS)
            yield arriving


class _Requests:
    """Be the pieces of one message under way; the tensor is held so that its memory stays."""

    def __init__(self, operation: str, requests: list[MPI.Request], tensor: Tensor) -> None:
        self._operation = operation
        self._requests = requests
        self._tensor = tensor

    def done(self) -> bool:
        return bool(MPI.Request.Testall(self._requests))

    def wait(self) -> None:
        with waiting(self._operation):
            MPI.Request.Waitall(self._requests)


def _adopt(comm: MPI.Comm) -> MpiTransport:
    assert isinstance(comm, MPI.Intracomm), "ranks of one world make no intercommunicator"
    transport = MpiTransport(comm)
    comm.Free()
    return transport


def _bytes(tensor: Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _pieces(tensor: Tensor) -> Iterator[list[Any]]:
    """Yield the tensor's bytes as buffers of at most one message; one empty message for an empty tensor."""
    address, total = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    for start in range(0, max(total, 1), MESSAGE_BYTES):
        nbytes = min(MESSAGE_BYTES, total - start)
        yield [MPI.buffer.fromaddress(address + start, nbytes), nbytes, MPI.BYTE]
