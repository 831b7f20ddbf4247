"""Arguments of a communicator's operations: checks, cache key, and access to the memory of tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.transport.base import TAGS
from hpctrain.errors import CommunicationError

USER_TAGS = TAGS - 2  # the last two tags are reserved for collectives


@dataclass(frozen=True)
class ArgumentChecks:
    """Argument checks on rank ``rank`` of ``size``; each method raises ``CommunicationError``."""

    rank: int
    size: int

    def check_root(self, root: int) -> None:
        """Refuse a root outside of the communicator."""
        if not 0 <= root < self.size:
            raise CommunicationError(f"rank {root} is not in 0..{self.size - 1}")

    def check_tag(self, tag: int) -> None:
        """Refuse a tag outside of the range for users."""
        if not 0 <= tag < USER_TAGS:
            raise CommunicationError(f"tag {tag} is not in 0..{USER_TAGS - 1}")

    def check_shares(self, share: Tensor, whole: Tensor) -> None:
        """Refuse a share whose dtype or size is not that of one of ``size`` equal shares of the whole."""
        if share.dtype != whole.dtype or share.numel() * self.size != whole.numel():
            raise CommunicationError(
                f"{whole.numel()} elements of {whole.dtype} are not {self.size} shares "
                f"of {share.numel()} elements of {share.dtype}"
            )

    def check_exchanged(self, out: Tensor, tensor: Tensor) -> None:
        """Refuse tensors that differ in size or dtype, or that do not divide into equal shares for all ranks."""
        if out.dtype != tensor.dtype or out.numel() != tensor.numel() or tensor.numel() % self.size:
            raise CommunicationError(
                f"all_to_all of {tensor.numel()} elements of {tensor.dtype} into {out.numel()} of {out.dtype}: "
                f"expected equal tensors that {self.size} ranks can share"
            )

    def only_on(self, root: int, whole: Tensor | None, name: str, share: Tensor) -> Tensor | None:
        """Return the tensor that only the root passes, after a check; return None on the other ranks."""
        self.check_root(root)
        if self.rank != root:
            return None
        if whole is None:
            raise CommunicationError(
                f"the root, rank {root}, needs {name}: {self.size} shares of {share.numel()} elements"
            )
        self.check_shares(share, whole)
        return whole


def check_contiguous(tensor: Tensor) -> None:
    """Refuse a non-contiguous tensor: an asynchronous receive cannot write into it."""
    if not tensor.is_contiguous():
        raise CommunicationError(f"irecv wants a contiguous tensor, not strides {tuple(tensor.stride())}; use recv")


@dataclass(frozen=True)
class CollectiveCall:
    """Collective and its arguments: flat, contiguous host tensors, and a reduction or a root if it has one."""

    operation: str
    tensor: Tensor
    out: Tensor | None = None
    op: str = ""
    root: int | None = None

    @property
    def whole(self) -> Tensor:
        """Return the tensor that contains the data of all ranks: ``out`` of an all_gather, else ``tensor``."""
        return self.out if self.out is not None and self.out.numel() > self.tensor.numel() else self.tensor

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments in the order of all algorithms: out, tensor, op, root, without those it lacks."""
        out = () if self.out is None else (self.out,)
        op = (self.op,) if self.op else ()
        return (*out, self.tensor, *op, *(() if self.root is None else (self.root,)))

    def without_references(self) -> CollectiveCall:
        """Return this call on the same memory, without references to the tensors."""
        return replace(
            self,
            tensor=_unowned_view(self.tensor),
            out=None if self.out is None else _unowned_view(self.out),
        )


def call_key(operation: str, tensor: Tensor, out: Tensor | None, op: str, root: int | None, algorithm: str) -> Hashable:
    """Return the cache key of a collective; a cached call needs no second check of its arguments."""
    if out is None:
        return operation, tensor.data_ptr(), tensor.numel(), tensor.dtype, op, root, algorithm
    sizes = out.numel(), tensor.numel(), out.dtype, tensor.dtype
    return operation, out.data_ptr(), tensor.data_ptr(), sizes, op, root, algorithm


@contextmanager
def as_flat_host(tensor: Tensor, *, back: bool = True) -> Iterator[Tensor]:
    """Yield a flat, contiguous host tensor of the same content; copy it ``back`` afterwards if it is a copy."""
    host = tensor.detach()
    if host.device.type == "cpu" and host.is_contiguous():
        yield host.view(-1)
        return
    host = host.contiguous().cpu()
    yield host.view(-1)
    if back:
        tensor.detach().copy_(host)


def _unowned_view(tensor: Tensor) -> Tensor:
    """Return a flat tensor of the same host memory that holds no reference to it."""
    from mpi4py import MPI

    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
