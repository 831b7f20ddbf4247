"""Interface of all transports, call recorder, and the transport of a world of one rank."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain.comm.transport.waiting import waiting
from hpctrain.errors import CommunicationError


class Recorder:
    """Numbers of calls and bytes of each operation on this rank.

    ``calls["send"]`` and ``bytes["send"]`` count the data that this rank passed to the transport.
    ``"window"`` counts the bytes that this rank wrote into node memory for several ranks, and
    ``"handover"`` those for one rank (``slots``).
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, operation: str, nbytes: int) -> None:
        """Add one call of ``nbytes``."""
        self.calls[operation] += 1
        self.bytes[operation] += nbytes


class Recordable:
    """Mixin that reports calls and bytes to an attached recorder; otherwise one ``is None`` check."""

    recorder: Recorder | None = None

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Attach a new recorder for the duration of a ``with`` block."""
        before, self.recorder = self.recorder, Recorder()
        try:
            yield self.recorder
        finally:
            self.recorder = before


# Tags below this are for callers. This tag, the highest that MPI guarantees, marks the transport's
# own messages.
TAGS = 32767

# Both MPI libraries lose a factor of two on messages above 32 MiB: they allocate temporaries of the
# message's size, and glibc maps and unmaps such large blocks on every call.
MESSAGE_BYTES = 16 * 2**20

PreparedCall = Callable[[], object]  # repeats an operation on the same memory


class Work(Protocol):
    """Handle of an operation in progress."""

    def done(self) -> bool:
        """Return whether the operation has completed, without blocking."""

    def wait(self) -> None:
        """Block until the operation has completed."""


class Finished:
    """Handle of an operation that has already completed."""

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return immediately."""


class Chain:
    """Handle of consecutive operations: the iterator starts the next one after the previous one has completed."""

    def __init__(self, links: Iterator[Work]) -> None:
        self._links = links
        self._link = next(links, None)

    def done(self) -> bool:
        """Start all operations that can start; return whether the last one has completed."""
        while self._link is not None and self._link.done():
            self._link = next(self._links, None)
        return self._link is None

    def wait(self) -> None:
        """Block until the last operation has completed."""
        while self._link is not None:
            self._link.wait()
            self._link = next(self._links, None)


class TensorTransport(Recordable, ABC):
    """Carrier of contiguous tensors on ``device`` between ``size`` ranks; this rank is number ``rank``.

    Public methods check and count; those with an underscore communicate. Its collectives are those of
    the underlying library; ``reduces`` returns whether the library has a suitable reduction for a
    dtype and an operation. All ranks call the collectives in the same order.
    """

    name: str
    rank: int
    size: int
    device = torch.device("cpu")
    tags = TAGS
    message_bytes = MESSAGE_BYTES  # longer messages are cut

    # Point to point -------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Send a tensor; return when its memory may be written again."""
        self.isend(tensor, peer, tag).wait()

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Receive into a tensor of the size that was sent."""
        self.irecv(tensor, peer, tag).wait()

    def isend(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Start to send a tensor; its memory must not change before ``wait``."""
        self._check(tensor, peer, tag)
        self._count("send", tensor)
        return self._isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Start to receive into a tensor; the content is valid after ``wait``."""
        self._check(tensor, peer, tag)
        self._count("recv", tensor)
        return self._irecv(tensor, peer, tag)

    # Collectives ----------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        with waiting("barrier"):
            self._barrier()

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Copy the root's tensor to every rank, in place."""
        self._check(tensor, root)
        self.prepared_broadcast(tensor, root)()

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce elementwise over the ranks, in place; ``op`` is sum, min, max or product."""
        self._check(tensor)
        self.prepared_all_reduce(tensor, op)()

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """Concatenate the tensors of all ranks, in rank order; ``tensor`` may be its own slice of ``out``."""
        self._check(out)
        self._check(tensor)
        self.prepared_all_gather(out, tensor)()

    def all_to_all(self, out: Tensor, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        """Send ``sent[r]`` elements to each rank r and receive ``received[r]`` from it, both packed in rank order."""
        with waiting("all_to_all"):
            self.iall_to_all(out, tensor, sent, received).wait()

    def iall_to_all(self, out: Tensor, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Work:
        """Start an ``all_to_all``, one at a time; it progresses when ``done`` or ``wait`` is called."""
        self._check(out)
        self._check(tensor)
        self._count("all_to_all", tensor)
        return self._iall_to_all(out, tensor, sent, received)

    @abstractmethod
    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Return whether the underlying library can reduce this dtype by this operation."""

    # Prepared calls, for repeated operations on the same memory ------------------------------------------------------

    def prepared_broadcast(self, tensor: Tensor, root: int) -> PreparedCall:
        """Return a call that copies the root's tensor to every rank."""
        return self._prepared("broadcast", self._broadcast(tensor, root), tensor)

    def prepared_all_reduce(self, tensor: Tensor, op: str) -> PreparedCall:
        """Return a call that reduces a tensor over the ranks, in place."""
        return self._prepared("all_reduce", self._all_reduce(tensor, op), tensor)

    def prepared_all_gather(self, out: Tensor, tensor: Tensor) -> PreparedCall:
        """Return a call that concatenates the tensors of all ranks."""
        return self._prepared("all_gather", self._all_gather(out, tensor), tensor)

    def prepared_reduce(self, tensor: Tensor, op: str, root: int) -> PreparedCall:
        """Return a call that reduces over the ranks into the root's tensor; other ranks' tensors are unchanged."""
        raise CommunicationError(f"transport {self.name} has no reduce")

    def prepared_message(self, operation: str, tensor: Tensor, peer: int, tag: int) -> PreparedCall | None:
        """Return a call that makes a blocking ``send`` or ``recv`` of a tensor; None: the method of that name does."""
        return None

    def _prepared(self, operation: str, calls: Sequence[PreparedCall], tensor: Tensor) -> PreparedCall:
        """Return one call that makes them all, records the wait, and counts the bytes handed over."""
        call = calls[0] if len(calls) == 1 else lambda: [call() for call in calls]
        return waiting.around(operation, call, self, tensor.nbytes)

    @abstractmethod
    def free(self) -> None:
        """Free the resources of the transport. Collective."""

    # Methods that a carrier implements; those of collectives return the calls that perform them, in order -------------

    @abstractmethod
    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Work: ...

    @abstractmethod
    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Work: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> list[PreparedCall]: ...

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: str) -> list[PreparedCall]: ...

    @abstractmethod
    def _all_gather(self, out: Tensor, tensor: Tensor) -> list[PreparedCall]: ...

    @abstractmethod
    def _iall_to_all(self, out: Tensor, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Work: ...

    def _check(self, tensor: Tensor, peer: int = 0, tag: int = 0) -> None:
        if tensor.device != self.device:
            raise CommunicationError(
                f"transport {self.name} of this rank carries tensors on {self.device}, not one on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise CommunicationError(
                f"transport {self.name} carries contiguous tensors, not strides {tuple(tensor.stride())}"
            )
        if not 0 <= peer < self.size:
            raise CommunicationError(f"rank {peer} is not in 0..{self.size - 1}")
        if not 0 <= tag < self.tags:
            raise CommunicationError(f"tag {tag} is not in 0..{self.tags - 1} (transport {self.name})")

    def _count(self, operation: str, tensor: Tensor) -> None:
        if self.recorder is not None:
            self.recorder.count(operation, tensor.numel() * tensor.element_size())


class Transport(TensorTransport):
    """Transport that also carries small Python objects, for agreement between ranks, and can be split."""

    @abstractmethod
    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""

    @abstractmethod
    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """Return the root's object."""

    @abstractmethod
    def split(self, color: int, key: int) -> Transport:
        """Return a transport of the ranks with the same color, ordered by key."""

    @abstractmethod
    def split_node(self) -> Transport:
        """Return a transport of the ranks that can share memory with this one."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """Abort the whole job immediately, from any rank and thread."""


# Transport of a world of one rank, without MPI: every collective is the identity --------------------------------------


class SingleTransport(Transport):
    """Transport of a single rank, which communicates with no other rank."""

    name = "single"
    rank = 0
    size = 1

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Return True: a reduction over one rank does not change a tensor."""
        return True

    def all_gather_object(self, item: Any) -> list[Any]:
        return [item]

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        return item

    def split(self, color: int, key: int) -> Transport:
        return SingleTransport()

    def split_node(self) -> Transport:
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

    def _broadcast(self, tensor: Tensor, root: int) -> list[PreparedCall]:
        return []

    def _all_reduce(self, tensor: Tensor, op: str) -> list[PreparedCall]:
        return []

    def _all_gather(self, out: Tensor, tensor: Tensor) -> list[PreparedCall]:
        return [lambda: out.view(-1).copy_(tensor.view(-1))]

    def _iall_to_all(self, out: Tensor, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Work:
        out.view(-1)[: received[0]].copy_(tensor.reshape(-1)[: sent[0]])
        return Finished()
