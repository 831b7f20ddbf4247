"""Transport of a world of one rank, without MPI: every collective is the identity."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.transport.base import Finished, Transport, Work
from hpctrain.errors import CommunicationError


class SingleTransport(Transport):
    """Transport of a single rank, which communicates with no other rank."""

    name = "single"
    rank = 0
    size = 1

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Return True: a reduction over one rank does not change a tensor."""
        return True

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the object in a list."""
        return [item]

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """Return the object."""
        return item

    def split(self, color: int, key: int) -> Transport:
        """Return a new transport of one rank."""
        return SingleTransport()

    def split_node(self) -> Transport:
        """Return a new transport of one rank."""
        return SingleTransport()

    def abort(self, code: int) -> None:
        """Exit the process without unwinding, as MPI's abort would."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def free(self) -> None:
        """Do nothing: there are no resources to free."""

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        raise CommunicationError("a world of one rank has no rank to send to")

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        raise CommunicationError("a world of one rank has no rank to receive from")

    def _barrier(self) -> None:
        return

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        return

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        return

    def _all_gather(self, out: Tensor, tensor: Tensor) -> None:
        out.view(-1).copy_(tensor.reshape(-1))

    def _iall_to_all(self, out: Tensor, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Work:
        out.view(-1)[: received[0]].copy_(tensor.reshape(-1)[: sent[0]])
        return Finished()
