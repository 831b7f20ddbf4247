"""Coalescing of small tensors: several share one message, because each message costs its latency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.reduction import check_op


@dataclass
class _Batch:
    """Tensors that can share one message: same operation, reduction or root, dtype and device."""

    communicate: Callable[[Tensor], object]
    tensors: list[Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Communicate the tensors as one flat tensor and copy the results back."""
        if len(self.tensors) == 1:
            self.communicate(self.tensors[0])
            return
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors])
        self.communicate(flat)
        for tensor, part in zip(self.tensors, torch.split(flat, [tensor.numel() for tensor in self.tensors])):
            tensor.detach().copy_(part.view_as(tensor))


class CoalescingBucket:
    """Context manager that coalesces operations on small tensors at the end of the ``with`` block.

        with comm.bucket() as bucket:
            bucket.all_reduce(loss, "average")
            bucket.all_reduce(norm, "average")  # in the same message
            bucket.broadcast(seed, root=0)

    All ranks add the same tensors in the same order. The results are available after the block. If
    the block raises an exception, nothing is sent.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._batches: dict[tuple[object, ...], _Batch] = {}

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Reduce elementwise over all ranks, in place."""
        check_op(op, tensor.dtype)
        self._add(("all_reduce", op), lambda flat: self._comm.all_reduce(flat, op), tensor)

    def reduce(self, tensor: Tensor, op: str = "sum", root: int = 0) -> None:
        """Reduce elementwise into the root's tensor."""
        check_op(op, tensor.dtype)
        self._add(("reduce", op, root), lambda flat: self._comm.reduce(flat, op, root), tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Copy the root's tensor to every rank, in place."""
        self._add(("broadcast", root), lambda flat: self._comm.broadcast(flat, root), tensor)

    def __enter__(self) -> CoalescingBucket:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        batches, self._batches = list(self._batches.values()), {}
        if kind is None:
            for batch in batches:
                batch.run()

    def _add(self, key: tuple[object, ...], communicate: Callable[[Tensor], object], tensor: Tensor) -> None:
        self._batches.setdefault((*key, tensor.dtype, tensor.device), _Batch(communicate)).tensors.append(tensor)
