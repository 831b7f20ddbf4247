"""Carry host tensors by mpi4py, in messages that the MPI libraries handle well."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.errors import CommunicationError
from hpctrain.transport import mpi_calls
from hpctrain.transport.activity import waiting
from hpctrain.transport.base import TAGS, Call, Chain, Transport, Work
from hpctrain.transport.mpi_calls import in_bytes
from hpctrain.transport.mpi_file import MpiFile


class MpiTransport(Transport):
    """Carry tensors over a communicator of its own, duplicated from the one given."""

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank = self.comm.Get_rank()
        self.size = self.comm.Get_size()

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Tell whether MPI reduces this dtype as torch does."""
        return mpi_calls.reduces(dtype, op)

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

    def create_file(self, path: Path, size: int, hints: Mapping[str, str]) -> MpiFile:
        """Return a new file, open on all ranks to write together; a call by all of them."""
        return MpiFile(self.comm, path, size, hints)

    def abort(self, code: int) -> None:
        """End the whole job now: every rank of the world, not only of this communicator."""
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(code)

    def free(self) -> None:
        """Give the communicator back; a call by all of its ranks."""
        self.comm.Free()

    def prepared_broadcast(self, tensor: Tensor, root: int) -> Call:
        """Return a call that copies the root's tensor to every rank."""
        return self._prepared("broadcast", mpi_calls.broadcast(self.comm, tensor, root), tensor)

    def prepared_all_reduce(self, tensor: Tensor, op: str) -> Call:
        """Return a call that reduces a tensor over the ranks, in place."""
        self._check_reduction(tensor, op)
        return self._prepared("all_reduce", mpi_calls.all_reduce(self.comm, tensor, op), tensor)

    def prepared_reduce(self, tensor: Tensor, op: str, root: int) -> Call:
        """Return a call that reduces over the ranks into the root's tensor; the others keep theirs."""
        self._check_reduction(tensor, op)
        return self._prepared("reduce", mpi_calls.reduce(self.comm, tensor, op, root), tensor)

    def prepared_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> Call:
        """Return a call that reduces over the ranks and keeps share ``rank`` in ``out``."""
        self._check_reduction(tensor, op)
        inside = 0 <= out.data_ptr() - tensor.data_ptr() < tensor.nbytes
        room = torch.empty_like(out) if inside else out  # MPI wants two memories, or another place for the result
        reduce = self._prepared("reduce_scatter", mpi_calls.reduce_scatter(self.comm, room, tensor, op), tensor)
        if not inside:
            return reduce

        target, source = out.view(-1).view(torch.uint8).numpy(), room.view(-1).view(torch.uint8).numpy()

        def call() -> None:
            reduce()
            np.copyto(target, source)  # half of what a copy of torch's costs

        return call

    def prepared_all_gather(self, out: Tensor, tensor: Tensor) -> Call:
        """Return a call that puts the tensors of all ranks behind each other."""
        own = out.view(-1)[self.rank * tensor.numel() : (self.rank + 1) * tensor.numel()]
        gather = self._prepared("all_gather", mpi_calls.all_gather(self.comm, out, tensor), tensor)
        if own.data_ptr() == tensor.data_ptr():
            return gather

        def call() -> None:
            own.copy_(tensor)
            gather()

        return call

    def _prepared(self, operation: str, calls: list[Call], tensor: Tensor) -> Call:
        return mpi_calls.prepared(operation, calls, self, tensor.nbytes)

    def _check_reduction(self, tensor: Tensor, op: str) -> None:
        if not self.reduces(tensor.dtype, op):
            raise CommunicationError(f"MPI does not reduce {tensor.dtype} by {op}; use algorithm direct or auto")

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return _Requests("send", [self.comm.Isend(piece, peer, tag) for piece in in_bytes(tensor)], tensor)

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return _Requests("recv", [self.comm.Irecv(piece, peer, tag) for piece in in_bytes(tensor)], tensor)

    def _barrier(self) -> None:
        self.comm.Barrier()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        for call in mpi_calls.broadcast(self.comm, tensor, root):
            call()

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        self._check_reduction(tensor, op)
        for call in mpi_calls.all_reduce(self.comm, tensor, op):
            call()

    def _all_gather(self, out: Tensor, tensor: Tensor) -> None:
        out.view(-1).chunk(self.size)[self.rank].copy_(tensor.view(-1))
        for call in mpi_calls.all_gather(self.comm, out, tensor):
            call()

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
