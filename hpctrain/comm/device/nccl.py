"""Transport of GPU tensors over NCCL, one GPU per rank (see the note in ``nccl_channel``).

Operations without arithmetic treat tensors as bytes. An operation of more than ``PIECE_BYTES`` is
cut into several calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.device import nccl_channel
from hpctrain.comm.device.nccl_channel import BYTES, DTYPES, NcclChannel, op_code
from hpctrain.comm.device.streams import Streams, streams_of
from hpctrain.comm.transport.base import PreparedCall, TensorTransport, Transport, Work
from hpctrain.errors import CommunicationError, DeviceError

PIECE_BYTES = 2**30


class NcclTransport(TensorTransport):
    """Carrier of tensors on ``device`` between the ranks of a host transport, which the caller keeps.

    Construction is collective; each rank needs its own GPU. Operations complete in the order of the
    caller's stream: the host does not wait for them. ``streams`` and ``library`` default to CUDA's
    and CuPy's. Raises ``DeviceError`` if two ranks use one GPU, which NCCL refuses.
    """

    name = "nccl"
    tags = 1  # NCCL matches messages by order only

    def __init__(
        self,
        host: Transport,
        device: torch.device,
        *,
        streams: Streams | None = None,
        library: Any = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.rank, self.size, self.device = host.rank, host.size, device
        self._host = host
        self._piece_bytes = piece_bytes
        library = library if library is not None else nccl_channel.load()
        self._version = int(library.get_version())
        check_own_gpus(host.all_gather_object(identity(device)))
        unique = _share_id(host, library)
        self.channel = NcclChannel(library, streams or streams_of(device), self.size, self.rank, unique)

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Return whether NCCL reduces this dtype as torch does; ``op`` may also be average."""
        return op_code(dtype, op, self._version) is not None

    def prepared_reduce(self, tensor: Tensor, op: str, root: int) -> PreparedCall:
        code = self._code(tensor.dtype, op)

        def call(comm: Any, stream: int) -> None:
            for part, kind in self._cut(tensor):
                comm.reduce(part.data_ptr(), part.data_ptr(), part.numel(), kind, code, root, stream)

        return self._prepared("reduce", [lambda: self.channel.start("reduce", [tensor], call).wait()], tensor)

    def free(self) -> None:
        """Wait for pending operations, and destroy NCCL's communicator. Collective."""
        self.channel.close()

    # Implementation ---------------------------------------------------------------------------------------------------

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self.channel.defer("send", tensor, lambda comm, stream: self._put(comm, tensor, peer, stream))

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self.channel.defer("recv", tensor, lambda comm, stream: self._get(comm, tensor, peer, stream))

    def _iall_to_all(self, out: Tensor, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Work:
        outgoing, incoming = torch.split(tensor.view(-1), list(sent)), torch.split(out.view(-1), list(received))

        def call(comm: Any, stream: int) -> None:
            with self.channel.group():
                for peer in range(self.size):
                    self._put(comm, outgoing[peer], peer, stream)
                    self._get(comm, incoming[peer], peer, stream)

        return self.channel.start("all_to_all", [out, tensor], call)

    def _barrier(self) -> None:
        self.channel.flush()
        self._host.barrier()

    def _broadcast(self, tensor: Tensor, root: int) -> list[PreparedCall]:
        def call(comm: Any, stream: int) -> None:
            for address, nbytes in self._byte_ranges(tensor):
                comm.broadcast(address, address, nbytes, BYTES, root, stream)

        return [lambda: self.channel.start("broadcast", [tensor], call).wait()]

    def _all_reduce(self, tensor: Tensor, op: str) -> list[PreparedCall]:
        code = self._code(tensor.dtype, op)

        def call(comm: Any, stream: int) -> None:
            for part, kind in self._cut(tensor):
                comm.allReduce(part.data_ptr(), part.data_ptr(), part.numel(), kind, code, stream)

        return [lambda: self.channel.start("all_reduce", [tensor], call).wait()]

    def _all_gather(self, out: Tensor, tensor: Tensor) -> list[PreparedCall]:
        def call(comm: Any, stream: int) -> None:
            if tensor.nbytes <= self._piece_bytes:
                comm.allGather(tensor.data_ptr(), out.data_ptr(), tensor.nbytes, BYTES, stream)
                return
            with self.channel.group():
                for root, share in enumerate(out.view(-1).chunk(self.size)):
                    source = tensor.view(-1) if root == self.rank else share
                    for (start, nbytes), (into, _) in zip(self._byte_ranges(source), self._byte_ranges(share)):
                        comm.broadcast(start, into, nbytes, BYTES, root, stream)

        return [lambda: self.channel.start("all_gather", [out, tensor], call).wait()]

    def _code(self, dtype: torch.dtype, op: str) -> int:
        code = op_code(dtype, op, self._version)
        if code is None:
            raise CommunicationError(f"NCCL does not reduce {dtype} by {op} as torch does; use algorithm auto")
        return code

    def _cut(self, tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield pieces of the tensor, each small enough for one call, with their NCCL type."""
        for piece in torch.split(tensor.view(-1), self._piece_bytes // tensor.element_size()):
            if piece.numel():
                yield piece, DTYPES[tensor.dtype]

    def _byte_ranges(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        """Yield address and length of the tensor's bytes, in ranges small enough for one call."""
        address, total = tensor.data_ptr(), tensor.nbytes
        for start in range(0, total, self._piece_bytes):
            yield address + start, min(self._piece_bytes, total - start)

    def _put(self, comm: Any, tensor: Tensor, peer: int, stream: int) -> None:
        for address, nbytes in self._byte_ranges(tensor):
            comm.send(address, nbytes, BYTES, peer, stream)

    def _get(self, comm: Any, tensor: Tensor, peer: int, stream: int) -> None:
        for address, nbytes in self._byte_ranges(tensor):
            comm.recv(address, nbytes, BYTES, peer, stream)


def identity(device: torch.device) -> str:
    """Return a unique name of this device, equal in all processes whatever devices they see; empty for a host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def check_own_gpus(identities: Sequence[str]) -> None:
    """Raise ``DeviceError`` on all ranks if two of them use one GPU."""
    for rank, name in enumerate(identities):
        first = identities.index(name)
        if name and first != rank:
            raise DeviceError(
                f"ranks {first} and {rank} use one GPU ({name}) and NCCL refuses that: "
                "start one rank per GPU, or use algorithm staged",
                everywhere=True,
            )


def _share_id(host: Transport, library: Any) -> Sequence[int]:
    # Broadcast the id or the reason for its absence: rank 0 must not leave the others waiting.
    found: tuple[Any, str] = (None, "")
    if host.rank == 0:
        try:
            found = (library.get_unique_id(), "")
        except Exception as error:
            found = (None, str(error))
    unique, why = host.broadcast_object(found)
    if unique is None:
        raise CommunicationError(f"NCCL cannot start: {why}", everywhere=True)
    return tuple(unique)
