"""Transport of device tensors over a CUDA-aware MPI, used only after a canary exchange has succeeded.

MPI has no notion of streams: before each call the host waits until the caller's stream has computed
the data to send. Received data are in memory when the MPI call returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.device.streams import Streams, streams_of
from hpctrain.comm.transport.base import MESSAGE_BYTES, PreparedCall, Work
from hpctrain.comm.transport.mpi import MpiTransport


class CudaMpiTransport(MpiTransport):
    """Carrier of tensors on ``device`` over its own duplicate of a communicator."""

    name = "mpi"

    def __init__(
        self,
        comm: MPI.Intracomm,
        device: torch.device,
        streams: Streams | None = None,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        super().__init__(comm, message_bytes)
        self.device = device
        self._streams = streams or streams_of(device)

    def _prepared(self, operation: str, calls: Sequence[PreparedCall], tensor: Tensor) -> PreparedCall:
        prepared = super()._prepared(operation, calls, tensor)

        def call() -> None:
            self._settle()
            prepared()

        return call

    def _settle(self) -> None:
        self._streams.synchronize(self._streams.record(self._streams.current()))

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        self._settle()
        return super()._isend(tensor, peer, tag)

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        # Pending computations on the old content must not read the new content.
        self._settle()
        return super()._irecv(tensor, peer, tag)

    def _iall_to_all(self, out: Tensor, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Work:
        self._settle()
        return super()._iall_to_all(out, tensor, sent, received)
