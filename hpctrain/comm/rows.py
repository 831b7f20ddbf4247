"""All-gather of rows whose number differs between ranks, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpctrain.errors import MismatchError

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

RowType = tuple[tuple[int, ...], str, bool, bool]  # shape, dtype, requires a gradient, has a nonzero weight


def gather_rows(comm: Communicator, tensor: Tensor, weight: float, algorithm: str) -> Tensor:
    """Return the rows of all ranks' tensors, concatenated in rank order; a rank of ``weight`` 0 adds no rows.

    Collective. Raises ``MismatchError`` on all ranks if the tensors differ in more than the number
    of rows.
    """
    requires_grad = tensor.requires_grad and torch.is_grad_enabled()
    row_types: list[RowType] = comm.all_gather_object(
        (tuple(tensor.shape), str(tensor.dtype), requires_grad, weight != 0)
    )
    _check_row_types(row_types)
    counts = [shape[0] if counts else 0 for shape, _, _, counts in row_types]
    if not requires_grad:
        return _gather(comm, tensor, counts, algorithm)
    apply: Callable[..., Tensor] = _GatherRows.apply
    return apply(tensor, comm, counts, weight, algorithm)


def gather_into(comm: Communicator, out: Tensor, tensor: Tensor, algorithm: str) -> Tensor:
    """Gather equal shares into ``out``; return an alias of ``out`` that is differentiable."""
    apply: Callable[..., Tensor] = _GatherInto.apply
    return apply(tensor, out.detach(), comm, algorithm)


def _check_row_types(row_types: list[RowType]) -> None:
    """Raise if the tensors of two ranks cannot be gathered; all ranks reach the same result."""
    shape, dtype, requires_grad, _ = row_types[0]
    for rank, (other, kind, other_requires_grad, _) in enumerate(row_types):
        what = f"{list(other)} of {kind}"
        if not other:
            raise MismatchError(
                f"all_gather of rows: rank {rank} has a scalar; allowed are tensors of at least one dim; "
                "pass tensor.reshape(1)",
                everywhere=True,
            )
        if other[1:] != shape[1:] or len(other) != len(shape) or kind != dtype:
            raise MismatchError(
                f"all_gather of rows: rank 0 has {list(shape)} of {dtype}, rank {rank} has {what}; only the first dim "
                "may differ; give all ranks tensors of one dtype and equal other dims",
                everywhere=True,
            )
        if other_requires_grad is not requires_grad:
            with_grad, without = (rank, 0) if other_requires_grad else (0, rank)
            raise MismatchError(
                f"all_gather of rows: the tensor of rank {with_grad} requires a gradient, that of rank {without} does "
                "not; the backward pass is collective; detach on all, or on none",
                everywhere=True,
            )


def _gather(comm: Communicator, tensor: Tensor, counts: list[int], algorithm: str) -> Tensor:
    """Return the rows of all ranks; unequal shares are padded to the longest one."""
    longest = max(counts)
    own = tensor.detach()[: counts[comm.rank]]
    if min(counts) < longest:
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: len(own)] = own
        own = padded
    gathered = own.new_empty((comm.size * longest, *own.shape[1:]))
    if gathered.numel():
        comm.all_gather(gathered, own.contiguous(), algorithm=algorithm)
    if min(counts) == longest:
        return gathered
    return torch.cat([rows[:count] for rows, count in zip(torch.split(gathered, longest), counts)])


class _GatherRows(torch.autograd.Function):
    """Gather of rows; the gradient of a rank's rows is the sum of all ranks' gradients for them."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, comm: Communicator, counts: list[int], weight: float, algorithm: str
    ) -> Tensor:
        ctx.comm, ctx.counts, ctx.weight, ctx.rows = comm, counts, weight, len(tensor)
        return _gather(comm, tensor, counts, algorithm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        counts, weight, rank = ctx.counts, ctx.weight, ctx.comm.rank
        weighted = grad * weight if weight else torch.zeros_like(grad)  # a placeholder batch may have inf gradients
        own = _sum_of_own_rows(ctx.comm, weighted.contiguous(), counts)
        if not weight:
            return grad.new_zeros((ctx.rows, *grad.shape[1:])), *[None] * 4
        assert len(own) == counts[rank]
        return own / weight if weight != 1 else own, *[None] * 4


def _sum_of_own_rows(comm: Communicator, grad: Tensor, counts: list[int]) -> Tensor:
    """Return the sum over all ranks of this rank's rows of ``grad``."""
    if min(counts) == max(counts):
        own = grad.new_empty((counts[comm.rank], *grad.shape[1:]))
        if own.numel():
            comm.reduce_scatter(own, grad)
        return own
    whole = grad.clone()
    comm.all_reduce(whole)
    return torch.split(whole, counts)[comm.rank]


class _GatherInto(torch.autograd.Function):
    """Gather of equal shares into a tensor of the caller."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, out: Tensor, comm: Communicator, algorithm: str) -> Tensor:
        ctx.comm, ctx.shape = comm, tensor.shape
        ctx.mark_dirty(out)
        return comm.all_gather(out, tensor.detach(), algorithm=algorithm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        own = grad.new_empty(ctx.shape)
        if own.numel():
            ctx.comm.reduce_scatter(own, grad.contiguous())
        return own, None, None, None
