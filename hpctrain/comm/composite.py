"""Operations composed of a communicator's own: rows of unequal number, coalesced small tensors, clock offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpctrain.comm.reduction import check_op
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
        problem = ""
        if not other:
            problem = f"rank {rank} has a scalar; allowed are tensors of at least one dim; pass tensor.reshape(1)"
        elif other[1:] != shape[1:] or len(other) != len(shape) or kind != dtype:
            problem = (
                f"rank 0 has {list(shape)} of {dtype}, rank {rank} has {list(other)} of {kind}; only the first dim may "
                "differ; give all ranks tensors of one dtype and equal other dims"
            )
        elif other_requires_grad is not requires_grad:
            with_grad, without = (rank, 0) if other_requires_grad else (0, rank)
            problem = (
                f"the tensor of rank {with_grad} requires a gradient, that of rank {without} does not; the backward "
                "pass is collective; detach on all, or on none"
            )
        if problem:
            raise MismatchError(f"all_gather of rows: {problem}", everywhere=True)


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


# Coalescing of small tensors: several share one message, because each message costs its latency -----------------------


_Communicate = Callable[[Tensor], object]


def _run_together(communicate: _Communicate, tensors: Sequence[Tensor]) -> None:
    """Communicate the tensors as one flat tensor and copy the results back."""
    if len(tensors) == 1:
        communicate(tensors[0])
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    communicate(flat)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors])):
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
        # Tensors that can share one message: same operation, reduction or root, dtype and device.
        self._batches: dict[tuple[object, ...], tuple[_Communicate, list[Tensor]]] = {}

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
            for communicate, tensors in batches:
                _run_together(communicate, tensors)

    def _add(self, key: tuple[object, ...], communicate: _Communicate, tensor: Tensor) -> None:
        self._batches.setdefault((*key, tensor.dtype, tensor.device), (communicate, []))[1].append(tensor)


# Offset between the clocks of two ranks, by round-trip messages (Cristian, 1989) --------------------------------------
#
# The fastest of several round trips is the most accurate: the other clock was read at its midpoint,
# with an error of at most half of the round trip.


Clock = Callable[[], float]
ClockSample = tuple[float, float, float]  # times: sent here, received there, returned here


def ask_clock(comm: Communicator, peer: int, rounds: int, clock: Clock) -> list[ClockSample]:
    """Return samples of the clock of a peer, which calls ``answer_clock`` with as many rounds."""
    message = torch.zeros(1, dtype=torch.float64)
    samples = []
    for _ in range(rounds):
        sent = clock()
        comm.send(message, peer)
        comm.recv(message, peer)
        samples.append((sent, message.item(), clock()))
    return samples


def answer_clock(comm: Communicator, peer: int, rounds: int, clock: Clock) -> None:
    """Send this rank's clock to a peer that calls ``ask_clock``."""
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(rounds):
        comm.recv(message, peer)
        message.fill_(clock())
        comm.send(message, peer)


def offset(samples: Sequence[ClockSample]) -> tuple[float, float]:
    """Return by how much the other clock is ahead, and the error bound: half of the fastest round trip."""
    sent, there, back = min(samples, key=lambda sample: sample[2] - sample[0])
    return there - (sent + back) / 2, (back - sent) / 2
