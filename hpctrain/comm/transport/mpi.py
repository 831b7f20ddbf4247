"""Transport of host tensors over mpi4py: prepared collectives, messages, and collective file writes with MPI-IO."""

from __future__ import annotations

import errno
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.transport import failures
from hpctrain.comm.transport.base import MESSAGE_BYTES, TAGS, Chain, PreparedCall, Transport, Work
from hpctrain.comm.transport.waiting import waiting
from hpctrain.errors import CommunicationError

# Collectives of shares cannot be cut without strided types. Up to the largest count that every
# library supports, they are one call.
SHARES_BYTES = 2**31 - 1

# MPI does not support 16-bit floats, or not in every library. Sums of 8- and 16-bit integers
# saturate in Open MPI's vector code, and wrap around elsewhere.
DTYPES = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
}
OPS = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}

Spec = tuple[Any, ...]  # mpi4py buffer specification: memory, count, type; a tuple is parsed faster than a list

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


class MpiTransport(Transport):
    """Carrier of tensors over its own duplicate of a communicator; longer messages are cut at ``message_bytes``.

    With ``keeps`` it takes the communicator itself, which nothing else may use.
    """

    name = "mpi"

    def __init__(
        self,
        comm: MPI.Intracomm,
        message_bytes: int = MESSAGE_BYTES,
        shares_bytes: int = SHARES_BYTES,
        *,
        keeps: bool = False,
    ) -> None:
        self.comm = comm if keeps else comm.Dup()
        self.message_bytes, self._shares_bytes = message_bytes, shares_bytes
        self.rank = self.comm.Get_rank()
        self.size = self.comm.Get_size()
        failures.register(self.comm)

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Return whether MPI reduces this dtype as torch does; min and max of floats may drop NaN in MPI."""
        return dtype in DTYPES and op in OPS and not (dtype.is_floating_point and op in ("min", "max"))

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order; they are pickled."""
        with waiting("all_gather_object"):
            return self.comm.allgather(item) if not failures.RANK_FAILURES else self._gathered(pickle.dumps(item))

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """Return the root's object; it is pickled."""
        with waiting("broadcast_object"):
            if not failures.RANK_FAILURES:
                return self.comm.bcast(item, root)
            data = pickle.dumps(item) if self.rank == root else b""
            size = np.array([len(data)], np.int64)
            self.comm.Bcast(size, root)
            failures.verify(self.comm)
            whole = bytearray(data) if self.rank == root else bytearray(int(size[0]))
            self.comm.Bcast([whole, MPI.BYTE], root)
            failures.verify(self.comm)
            return pickle.loads(whole)

    def _gathered(self, data: bytes) -> list[Any]:
        """Return the pickled objects of all ranks; collectives are verified, because sizes of garbage would crash."""
        sizes = np.empty(self.size, np.int64)
        self.comm.Allgather(np.array([len(data)], np.int64), sizes)
        failures.verify(self.comm)
        counts = sizes.tolist()
        whole = bytearray(sum(counts))
        self.comm.Allgatherv([data, MPI.BYTE], [whole, counts, MPI.BYTE])
        failures.verify(self.comm)
        ends = list(accumulate(counts))
        return [pickle.loads(memoryview(whole)[end - count : end]) for end, count in zip(ends, counts)]

    def split(self, color: int, key: int) -> Transport:
        return self._part(self.comm.Split(color, key))

    def split_node(self) -> MpiTransport:
        return self._part(self.comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank))

    def _part(self, comm: MPI.Comm) -> MpiTransport:
        assert isinstance(comm, MPI.Intracomm), "ranks of one world make no intercommunicator"
        return MpiTransport(comm, self.message_bytes, self._shares_bytes, keeps=True)

    def create_file(self, path: Path, size: int, hints: Mapping[str, str]) -> MpiFile:
        """Return a new file, opened by all ranks for collective writes. Collective."""
        return MpiFile(self.comm, path, size, hints)

    def abort(self, code: int) -> None:
        """Abort the whole job immediately: all ranks of the world, also those outside of this communicator."""
        sys.stdout.flush()
        sys.stderr.flush()
        failures.abort(code)

    def free(self) -> None:
        self.comm.Free()

    # Collectives ------------------------------------------------------------------------------------------------------
    #
    # A prepared call stores addresses and counts. Beyond the MPI call, it only records the operation
    # that this rank waits for. It does not keep its memory alive.

    def prepared_reduce(self, tensor: Tensor, op: str, root: int) -> PreparedCall:
        self._check_reduction(tensor, op)
        calls: list[PreparedCall]
        if self.rank == root:
            calls = [partial(self.comm.Reduce, MPI.IN_PLACE, spec, OPS[op], root) for spec in self._elements(tensor)]
        else:
            calls = [partial(self.comm.Reduce, spec, None, OPS[op], root) for spec in self._elements(tensor)]
        return self._prepared("reduce", calls, tensor)

    def prepared_reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> PreparedCall:
        """Return a call that reduces over the ranks and stores share ``rank`` in ``out``."""
        self._check_reduction(tensor, op)
        aliased = 0 <= out.data_ptr() - tensor.data_ptr() < tensor.nbytes
        result = torch.empty_like(out) if aliased else out  # MPI forbids aliased buffers, so reduce into a temporary
        reduce = self._prepared("reduce_scatter", self._reduce_scatter(result, tensor, op), tensor)
        if not aliased:
            return reduce

        target, source = out.view(-1).view(torch.uint8).numpy(), result.view(-1).view(torch.uint8).numpy()

        def call() -> None:
            reduce()
            np.copyto(target, source)  # costs half as much as a torch copy

        return call

    def prepared_all_gather(self, out: Tensor, tensor: Tensor) -> PreparedCall:
        own = out.view(-1)[self.rank * tensor.numel() : (self.rank + 1) * tensor.numel()]
        gather = super().prepared_all_gather(out, tensor)
        if own.data_ptr() == tensor.data_ptr():
            return gather

        def call() -> None:
            own.copy_(tensor.view(-1))
            gather()

        return call

    def _prepared(self, operation: str, calls: Sequence[PreparedCall], tensor: Tensor) -> PreparedCall:
        if failures.RANK_FAILURES:
            calls = [*calls, partial(failures.verify, self.comm)]
        return super()._prepared(operation, calls, tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> list[PreparedCall]:
        return [partial(self.comm.Bcast, spec, root) for spec in self._bytes(tensor)]

    def _all_reduce(self, tensor: Tensor, op: str) -> list[PreparedCall]:
        self._check_reduction(tensor, op)
        return [partial(self.comm.Allreduce, MPI.IN_PLACE, spec, OPS[op]) for spec in self._elements(tensor)]

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: str) -> list[PreparedCall]:
        """Return the calls of a reduce_scatter into equal shares; large tensors use one reduce per share."""
        kind = DTYPES[tensor.dtype]
        if tensor.nbytes <= self._shares_bytes:
            whole, part = (memory(tensor), out.numel(), kind), (memory(out), out.numel(), kind)
            return [partial(self.comm.Reduce_scatter_block, whole, part, OPS[op])]
        calls: list[PreparedCall] = []
        for root, share in enumerate(torch.split(tensor.view(-1), out.numel())):
            for source, target in zip(self._elements(share), self._elements(out)):
                calls.append(partial(self.comm.Reduce, source, target if root == self.rank else None, OPS[op], root))
        return calls

    def _all_gather(self, out: Tensor, tensor: Tensor) -> list[PreparedCall]:
        """Return the calls of an all_gather of shares in place; large tensors use one broadcast per share."""
        if out.nbytes <= self._shares_bytes:
            return [partial(self.comm.Allgather, MPI.IN_PLACE, (memory(out), MPI.BYTE))]
        shares = enumerate(out.view(-1).chunk(self.size))
        return [call for root, share in shares for call in self._broadcast(share, root)]

    def _barrier(self) -> None:
        self.comm.Barrier()
        failures.verify(self.comm)

    # Messages ---------------------------------------------------------------------------------------------------------

    def prepared_message(self, operation: str, tensor: Tensor, peer: int, tag: int) -> PreparedCall | None:
        """Return a blocking ``send`` or ``recv``; None if MPI reports dead ranks, by the status of each request."""
        if failures.RANK_FAILURES:
            return None
        self._check(tensor, peer, tag)
        call = self.comm.Send if operation == "send" else self.comm.Recv
        calls = [partial(call, piece, peer, tag) for piece in self._bytes(tensor)]
        return super()._prepared(operation, calls, tensor)

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return _Requests("send", [self.comm.Isend(piece, peer, tag) for piece in self._bytes(tensor)], tensor)

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return _Requests("recv", [self.comm.Irecv(piece, peer, tag) for piece in self._bytes(tensor)], tensor)

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

    def _check_reduction(self, tensor: Tensor, op: str) -> None:
        if not self.reduces(tensor.dtype, op):
            raise CommunicationError(f"MPI does not reduce {tensor.dtype} by {op}; use algorithm direct or auto")

    def _bytes(self, tensor: Tensor) -> list[Spec]:
        """Return the tensor's bytes as messages; an empty tensor gives one empty message."""
        address, total, most = tensor.data_ptr(), tensor.nbytes, self.message_bytes
        starts = range(0, max(total, 1), most)
        sizes = [min(most, total - start) for start in starts]
        return [
            (MPI.buffer.fromaddress(address + start, nbytes), nbytes, MPI.BYTE) for start, nbytes in zip(starts, sizes)
        ]

    def _elements(self, tensor: Tensor) -> list[Spec]:
        return in_elements(tensor, self.message_bytes)


class _Requests:
    """Handle of one message, sent in pieces; it holds a reference to the tensor, so that its memory stays valid."""

    def __init__(self, operation: str, requests: list[MPI.Request], tensor: Tensor) -> None:
        self._operation = operation
        self._requests = requests
        self._tensor = tensor

    def done(self) -> bool:
        return failures.all_complete(MPI.Request.Testall, self._requests)

    def wait(self) -> None:
        with waiting(self._operation):
            failures.all_complete(MPI.Request.Waitall, self._requests)


def memory(tensor: Tensor) -> MPI.buffer:
    """Return the bytes of a contiguous tensor."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def in_elements(tensor: Tensor, nbytes: int = MESSAGE_BYTES) -> list[Spec]:
    """Return the tensor's elements as messages of at most ``nbytes``."""
    pieces = torch.split(tensor.view(-1), nbytes // tensor.element_size())
    return [(memory(piece), piece.numel(), DTYPES[tensor.dtype]) for piece in pieces]


# Collective file writes -----------------------------------------------------------------------------------------------


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
