"""Move tensors between ranks such that gradients move the other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.tensor.pieces import bounds, lengths
from hpctrain.parallel.tensor.rooms import out_of, take

Move = Callable[..., Tensor]


# Without autograd -----------------------------------------------------------------------------------------------------


def total(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return the sum over the ranks."""
    room = take(comm, tensor.shape, tensor)
    room.copy_(tensor)
    comm.all_reduce(room)
    return out_of(room)


def part_of_sequence(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part of ``[batch, length, ...]`` along the length."""
    begin, end = _bounds_of_sequence(tensor, comm)
    return tensor[:, begin:end].contiguous()


def whole_sequence(part: Tensor, comm: Communicator) -> Tensor:
    """Return ``[batch, length, ...]`` of which each rank has a part along the length."""
    _check_dims(part)
    room = take(comm, (comm.size, *part.shape), part)
    room[comm.rank].copy_(part)
    comm.all_gather(room, room[comm.rank])
    whole = torch.empty(part.shape[0], comm.size, *part.shape[1:], dtype=part.dtype, device=part.device)
    return whole.copy_(room.transpose(0, 1)).flatten(1, 2)


def into_parts(tensor: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return a room with the parts of ``[batch, length, ...]`` rank by rank, and a new tensor for one of them."""
    _bounds_of_sequence(tensor, comm)
    batch, length, *rest = tensor.shape
    parts = tensor.view(batch, comm.size, length // comm.size, *rest).transpose(0, 1)
    room = take(comm, parts.shape, tensor)
    room.copy_(parts)
    return room, torch.empty(parts.shape[1:], dtype=tensor.dtype, device=tensor.device)


def total_part(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part, along the length, of the sum of ``[batch, length, ...]`` over the ranks."""
    room, part = into_parts(tensor.contiguous(), comm)
    comm.reduce_scatter(part, room)
    return part


def whole_outputs(piece: Tensor, features: int, comm: Communicator) -> Tensor:
    """Return ``[..., features]`` of which each rank has a piece, of the length that ``bounds`` gives it."""
    own, *rest = sizes = lengths(features, comm.size)
    # Shares are equal: the pieces that are one shorter leave the last place of each row as it is.
    room = take(comm, (comm.size, *piece.shape[:-1], own), piece)
    room[comm.rank][..., : piece.shape[-1]].copy_(piece)
    comm.all_gather(room, room[comm.rank])
    return torch.cat([room[rank][..., :size] for rank, size in enumerate(sizes)], dim=-1)


def _bounds_of_sequence(tensor: Tensor, comm: Communicator) -> tuple[int, int]:
    _check_dims(tensor)
    length = tensor.shape[1]
    if length % comm.size:
        raise UsageError(
            f"a sequence of {length} tokens cannot be split over {comm.size} tensor ranks: "
            f"with sequence parallelism lengths must be multiples of {comm.size}",
            everywhere=True,
        )
    return bounds(length, comm.rank, comm.size)


def _check_dims(tensor: Tensor) -> None:
    if tensor.dim() < 3:
        raise UsageError(
            f"sequence parallelism needs activations [batch, length, width], not of shape {tuple(tensor.shape)}",
            everywhere=True,
        )


# With autograd --------------------------------------------------------------------------------------------------------


class _Move(torch.autograd.Function):
    """Move a tensor one way and its gradient another; each is a function of a tensor and what the layer knows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Move, back: Move, *known: Any) -> Tensor:
        ctx.back, ctx.known = back, known
        ctx.varies = back in (total, total_part)  # what is summed backward, ranks go on with differently
        return there(tensor, *known)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad.contiguous(), *ctx.known), None, None, *[None] * len(ctx.known)


class _Summed(torch.autograd.Function):
    """Hand tensors on; their gradients are summed over the ranks, in one message."""

    varies = True

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: Tensor) -> Any:
        ctx.comm = comm
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with ctx.comm.bucket() as bucket:
            owned = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
            for grad in owned:
                bucket.all_reduce(grad)
        return None, *owned


def _same(tensor: Tensor, *_: Any) -> Tensor:
    return tensor.view_as(tensor)


def _own_outputs(whole: Tensor, features: int, comm: Communicator) -> Tensor:
    begin, end = bounds(features, comm.rank, comm.size)
    return whole[..., begin:end].contiguous()


_move: Move = _Move.apply
_summed: Callable[..., tuple[Tensor, ...]] = _Summed.apply


def spread(tensor: Tensor, comm: Communicator) -> Tensor:
    """Hand on what all ranks have; the gradient is the sum of theirs."""
    return _move(tensor, _same, total, comm)


def reduce(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return the sum over the ranks, which each needs for itself; the gradient is the same for all."""
    return _move(tensor, total, _same, comm)


def gather_outputs(piece: Tensor, features: int, comm: Communicator) -> Tensor:
    """Return all ranks' pieces along the last dim; the gradient of each is its piece."""
    return _move(piece, whole_outputs, _own_outputs, features, comm)


def split_sequence(tensor: Tensor, comm: Communicator) -> Tensor:
    """Keep this rank's part of what all ranks have; the gradients are gathered."""
    return _move(tensor, part_of_sequence, whole_sequence, comm)


def join_sequence(part: Tensor, comm: Communicator) -> Tensor:
    """Return the whole sequence, with which all ranks do the same: the gradient is this rank's part."""
    return _move(part, whole_sequence, part_of_sequence, comm)


def gather_sequence(part: Tensor, comm: Communicator) -> Tensor:
    """Return the whole sequence, with which each rank does something else: the gradient is the sum of theirs."""
    return _move(part, whole_sequence, total_part, comm)


def scatter_sequence(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part of the sum over the ranks; the gradients are gathered."""
    return _move(tensor, total_part, whole_sequence, comm)


def summed(tensors: list[Tensor], comm: Communicator) -> tuple[Tensor, ...]:
    """Hand on parameters that each rank applies to its part of the batch; gradients are summed in one message."""
    return _summed(comm, *tensors)
