"""Transport of host tensors over mpi4py, and collective file writes with MPI-IO."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.transport import mpi_calls
from hpctrain.comm.transport.base import TAGS, Chain, PreparedCall, Transport, Work
from hpctrain.comm.transport.mpi_calls import in_bytes
from hpctrain.comm.transport.waiting import waiting
from hpctrain.errors import CommunicationError

# Error codes of the operating system for MPI's error classes.
_ERRNO = {
    MPI.ERR_NO_SPACE: errno.ENOSPC,
    MPI.ERR_QUOTA: errno.EDQUOT,
    MPI.ERR_READ_ONLY: errno.EROFS,
    MPI.ERR_ACCESS: errno.EACCES,
    MPI.ERR_NO_SUCH_FILE: errno.ENOENT,
    MPI.ERR_FILE_EXISTS: errno.EEXIST,
    MPI.ERR_IO: errno.EIO,
}


class MpiFile:
    """New file of ``size`` bytes, open on all ranks. Every method is collective.

    The size is set first. MPI libraries also write the holes between pieces, with the content that
    they have read there. Beyond the end of a file, they would write arbitrary content of their
    buffers.

    ``hints`` are MPI's: ``striping_factor``, ``striping_unit``, ``cb_nodes``, ...; MPI ignores
    unknown ones. Errors are raised as ``OSError``.
    """

    def __init__(self, comm: MPI.Intracomm, path: Path, size: int, hints: Mapping[str, str]) -> None:
        info = MPI.Info.Create()
        for name, value in hints.items():
            info.Set(name, value)
        try:
            with _os_errors(path), waiting("open a file"):
                mode = MPI.MODE_CREATE | MPI.MODE_EXCL | MPI.MODE_RDWR
                self._file = MPI.File.Open(comm, os.fspath(path), mode, info)
                self._file.Set_size(size)
        finally:
            info.Free()
        self._path = path

    def write(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Write pieces of bytes at their offsets; a rank may pass an empty sequence. Collective."""
        ordered = sorted(pieces, key=lambda piece: piece[0])
        lengths = [len(data) for _, data in ordered]
        displacements = _blocks(lengths, [offset for offset, _ in ordered])
        memory = _blocks(lengths, [np.frombuffer(data, dtype=np.uint8).ctypes.data for _, data in ordered])
        try:
            with _os_errors(self._path), waiting("write a file"):
                self._file.Set_view(0, MPI.BYTE, displacements)
                self._file.Write_all([MPI.BOTTOM, 1 if ordered else 0, memory])
        finally:
            displacements.Free()
            memory.Free()

    def close(self) -> None:
        """Flush the file to disk and close it. Collective."""
        try:
            with _os_errors(self._path), waiting("flush a file"):
                self._file.Sync()
        finally:
            self._file.Close()


def _blocks(lengths: Sequence[int], displacements: Sequence[int]) -> MPI.Datatype:
    if not lengths:
        return MPI.BYTE.Dup().Commit()
    return MPI.BYTE.Create_hindexed(lengths, displacements).Commit()


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        number = _ERRNO.get(error.Get_error_class())
        text = os.strerror(number) if number else " ".join(error.Get_error_string().split())
        raise OSError(number or errno.EIO, text, str(path)) from error


# Transport of host tensors over mpi4py, with message sizes that MPI libraries handle well -----------------------------


class MpiTransport(Transport):
    """Carrier of tensors over its own duplicate of a communicator."""

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank = self.comm.Get_rank()
        self.size = self.comm.Get_size()

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Return whether MPI reduces this dtype as torch does."""
        return mpi_calls.reduces(dtype, op)

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order; they are pickled."""
        with waiting("all_gather_object"):
            return self.comm.allgather(item)

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """Return the root's object; it is pickled."""
        with waiting("broadcast_object"):
            return self.comm.bcast(item, root)

    def split(self, color: int, key: int) -> Transport:
        """Return a transport of the ranks with the same color, ordered by key."""
        return _transport_of(self.comm.Split(color, key))

    def split_node(self) -> MpiTransport:
        """Return a transport of the ranks that can share memory with this one."""
        return _transport_of(self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank))

    def create_file(self, path: Path, size: int, hints: Mapping[str, str]) -> MpiFile:
        """Return a new file, opened by all ranks for collective writes. Collective."""
        return MpiFile(self.comm, path, size, hints)

    def abort(self, code: int) -> None:
        """Abort the whole job immediately: all ranks of the world, also those outside of this communicator."""
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(code)

    def free(self) -> None:
        """Free the communicator. Collective."""
        self.comm.Free()

    def prepared_broadcast(self, tensor: Tensor, root: int) -> PreparedCall:
        """Return a call that copies the root's tensor to every rank."""
        return self._prepared("broadcast", mpi_calls.broadcast(self.comm, tensor, root), tensor)

    def prepared_all_reduce(self, tensor: Tensor, op: str) -> PreparedCall:
        """Return a call that reduces a tensor over the ranks, in place."""
        self._check_reduction(tensor, op)
        return self._prepared("all_reduce", mpi_calls.all_reduce(self.comm, tensor, op), tensor)

    def prepared_reduce(self, tensor: Tensor, op: str, root: int) -> PreparedCall:
        """Return a call that reduces over the ranks into the root's tensor; other ranks' tensors are unchanged."""
        self._check_reduction(tensor, op)
        return self._prepared("reduce", mpi_calls.reduce(self.comm, tensor, op, root), tensor)

    def prepared_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> PreparedCall:
        """Return a call that reduces over the ranks and stores share ``rank`` in ``out``."""
        self._check_reduction(tensor, op)
        aliased = 0 <= out.data_ptr() - tensor.data_ptr() < tensor.nbytes
        result = torch.empty_like(out) if aliased else out  # MPI forbids aliased buffers, so reduce into a temporary
        reduce = self._prepared("reduce_scatter", mpi_calls.reduce_scatter(self.comm, result, tensor, op), tensor)
        if not aliased:
            return reduce

        target, source = out.view(-1).view(torch.uint8).numpy(), result.view(-1).view(torch.uint8).numpy()

        def call() -> None:
            reduce()
            np.copyto(target, source)  # costs half as much as a torch copy

        return call

    def prepared_all_gather(self, out: Tensor, tensor: Tensor) -> PreparedCall:
        """Return a call that concatenates the tensors of all ranks."""
        own = out.view(-1)[self.rank * tensor.numel() : (self.rank + 1) * tensor.numel()]
        gather = self._prepared("all_gather", mpi_calls.all_gather(self.comm, out, tensor), tensor)
        if own.data_ptr() == tensor.data_ptr():
            return gather

        def call() -> None:
            own.copy_(tensor)
            gather()

        return call

    def _prepared(self, operation: str, calls: list[PreparedCall], tensor: Tensor) -> PreparedCall:
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
        # In round k each rank's partner is k ranks away, so that no rank receives from all others
        # at once.
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            receive = self._irecv(incoming[source], source, TAGS)
            yield self._isend(outgoing[to], to, TAGS)
            yield receive


class _Requests:
    """Handle of one message, sent in pieces; it holds a reference to the tensor, so that its memory stays valid."""

    def __init__(self, operation: str, requests: list[MPI.Request], tensor: Tensor) -> None:
        self._operation = operation
        self._requests = requests
        self._tensor = tensor

    def done(self) -> bool:
        return bool(MPI.Request.Testall(self._requests))

    def wait(self) -> None:
        with waiting(self._operation):
            MPI.Request.Waitall(self._requests)


def _transport_of(comm: MPI.Comm) -> MpiTransport:
    assert isinstance(comm, MPI.Intracomm), "ranks of one world make no intercommunicator"
    transport = MpiTransport(comm)
    comm.Free()
    return transport
