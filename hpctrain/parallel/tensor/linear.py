"""Products with split weights, overlapped with communication.

Note: the two functions save work compared with ``F.linear`` followed by a collective. Products that
are summed over the ranks are written directly to the reduction buffer, and copied out with the
bias. The gradient of a column-parallel layer's weight is computed while the gradient of its input
is summed, so a rank that arrives early does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpctrain.collectives.communicator import Communicator
from hpctrain.parallel.tensor.moves import into_parts, total_part, whole_sequence
from hpctrain.parallel.tensor.rooms import out_of, take
from hpctrain.transport.base import Work


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _Column(torch.autograd.Function):
    varies = True  # whether each rank uses the result differently (``flow``)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, comm: Communicator, sequence: bool) -> Tensor:
        ctx.comm, ctx.sequence = comm, sequence
        ctx.save_for_backward(x, weight)  # with sequence parallelism only the part: backward gathers again
        return torch.nn.functional.linear(whole_sequence(x, comm) if sequence else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        rows, grad_x, grad_weight = _rows(grad), None, None
        if ctx.sequence and for_weight:
            x = whole_sequence(x, ctx.comm)
        start = _start_parts if ctx.sequence else _start_sum
        work, result = start(rows, weight, (*grad.shape[:-1], weight.shape[1]), ctx.comm) if for_x else (None, None)
        if for_weight:
            grad_weight = rows.t().mm(_rows(x))
        grad_bias = rows.sum(0) if for_bias else None
        if work is not None:
            work.wait()
        if result is not None:
            grad_x = result if ctx.sequence else out_of(result)
        return grad_x, grad_weight, grad_bias, None, None


def _start_sum(rows: Tensor, weight: Tensor, shape: Any, comm: Communicator) -> tuple[Work, Tensor]:
    """Start to sum the gradient of the input, in a buffer."""
    room = take(comm, shape, rows)
    torch.mm(rows, weight, out=_rows(room))
    work = comm.all_reduce(room, async_op=True)
    assert not isinstance(work, Tensor)
    return work, room


def _start_parts(rows: Tensor, weight: Tensor, shape: Any, comm: Communicator) -> tuple[Work, Tensor]:
    """Start a reduce_scatter of the input's gradient; this rank keeps its part of the sequence."""
    room, part = into_parts(rows.mm(weight).view(shape), comm)
    work = comm.reduce_scatter(part, room, async_op=True)
    assert not isinstance(work, Tensor)
    return work, part


class _Row(torch.autograd.Function):
    varies = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, comm: Communicator, sequence: bool) -> Tensor:
        ctx.comm, ctx.sequence = comm, sequence
        ctx.save_for_backward(x, weight)
        shape = (*x.shape[:-1], weight.shape[0])
        if sequence:
            part = total_part(_rows(x).mm(weight.t()).view(shape), comm)
            return part if bias is None else part.add_(bias)
        room = take(comm, shape, x)
        torch.mm(_rows(x), weight.t(), out=_rows(room))
        comm.all_reduce(room)
        return out_of(room) if bias is None else room + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        # With sequence parallelism, a rank adds the bias only to its part.
        grad_bias = _rows(grad).sum(0) if for_bias else None
        if grad_bias is not None and ctx.sequence:
            ctx.comm.all_reduce(grad_bias)
        rows = _rows(whole_sequence(grad, ctx.comm) if ctx.sequence else grad)
        grad_x = rows.mm(weight).view(x.shape) if for_x else None
        grad_weight = rows.t().mm(_rows(x)) if for_weight else None
        return grad_x, grad_weight, grad_bias, None, None


column_linear: Callable[[Tensor, Tensor, Tensor | None, Communicator, bool], Tensor] = _Column.apply
row_linear: Callable[[Tensor, Tensor, Tensor | None, Communicator, bool], Tensor] = _Row.apply
