"""Communication functions of tensor parallelism, with and without autograd (Megatron-LM's ``mappings``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError


def bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return the begin and end of a rank's slice; with a remainder, the first ranks hold one element more."""
    share, more = divmod(length, size)
    begin = rank * share + min(rank, more)
    return begin, begin + share + (rank < more)


def lengths(length: int, size: int) -> list[int]:
    """Return the lengths of all slices, by rank."""
    return [end - begin for begin, end in (bounds(length, rank, size) for rank in range(size))]


def degrees(length: int, most: int = 64) -> str:
    """Return the tensor degrees, up to ``most``, that divide a length, as text."""
    return ", ".join(str(size) for size in range(1, min(length, most) + 1) if length % size == 0)


# Reusable buffers for in-place collectives ----------------------------------------------------------------------------
#
# Note: there is one buffer per communicator and dtype, used again and again. The caller fills it,
# calls one collective and copies the result out (which adding a bias does anyway), before any other
# operation of the communicator begins. Autograd therefore never holds the buffer. Other ranks write
# into it only inside a collective that this rank has also entered. Its address never changes, so the
# communicator can reuse its prepared call.


_ROOMS: WeakKeyDictionary[Communicator, dict[torch.dtype, Tensor]] = WeakKeyDictionary()


def take(comm: Communicator, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a buffer of a shape, to be filled and reduced at once. Collective, with the same shape on all ranks.

    On the host the buffer belongs to the communicator; on a device it is a new tensor.
    """
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    rooms, numel = _ROOMS.setdefault(comm, {}), prod(shape)
    room = rooms.get(like.dtype)
    if room is None or room.numel() < numel:
        # Such memory lives as long as the communicator. With sizes rounded up to powers of two, all buffers
        # together take at most twice the largest.
        room = rooms[like.dtype] = comm.empty(1 << (numel - 1).bit_length() if numel else 1, like.dtype)
    return room[:numel].view(*shape)


def out_of(lent: Tensor) -> Tensor:
    """Return the contents of a buffer from ``take`` as a tensor that the caller may keep."""
    return lent.clone() if lent.device.type == "cpu" else lent


# Communication functions of tensor parallelism, with and without autograd (Megatron-LM's ``mappings``) ----------------


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
    """Return the whole ``[batch, length, ...]``; each rank passes its part along the length."""
    _check_dims(part)
    room = take(comm, (comm.size, *part.shape), part)
    room[comm.rank].copy_(part)
    comm.all_gather(room, room[comm.rank])
    whole = torch.empty(part.shape[0], comm.size, *part.shape[1:], dtype=part.dtype, device=part.device)
    return whole.copy_(room.transpose(0, 1)).flatten(1, 2)


def into_parts(tensor: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return a buffer with the parts of ``[batch, length, ...]`` in rank order, and a new tensor for one of them."""
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
    """Return the whole ``[..., features]``; each rank passes its slice, with the length from ``bounds``."""
    own, *rest = sizes = lengths(features, comm.size)
    # The buffer has equal slots. A slice that is one shorter leaves the last element of each row unset.
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
    """Communication of a tensor forward and of its gradient backward, by two functions with common arguments."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Move, back: Move, *known: Any) -> Tensor:
        ctx.back, ctx.known = back, known
        ctx.varies = back in (total, total_part)  # ranks use a result differently if its gradient is summed
        return there(tensor, *known)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad.contiguous(), *ctx.known), None, None, *[None] * len(ctx.known)


class _Summed(torch.autograd.Function):
    """Identity forward; sums the gradients over the ranks backward, in one message."""

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
    """Return a tensor that all ranks hold alike, unchanged; the gradient is summed over the ranks."""
    return _move(tensor, _same, total, comm)


def reduce(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return the sum over the ranks, which all ranks use alike; the gradient passes unchanged."""
    return _move(tensor, total, _same, comm)


def gather_outputs(piece: Tensor, features: int, comm: Communicator) -> Tensor:
    """Return all ranks' slices along the last dim; the gradient of each is its slice."""
    return _move(piece, whole_outputs, _own_outputs, features, comm)


def split_sequence(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part of a sequence that all ranks hold; the gradients are gathered."""
    return _move(tensor, part_of_sequence, whole_sequence, comm)


def join_sequence(part: Tensor, comm: Communicator) -> Tensor:
    """Return the whole sequence, which all ranks use alike: the gradient is this rank's part."""
    return _move(part, whole_sequence, part_of_sequence, comm)


def gather_sequence(part: Tensor, comm: Communicator) -> Tensor:
    """Return the whole sequence, which each rank uses differently: the gradient is this rank's part of the sum."""
    return _move(part, whole_sequence, total_part, comm)


def scatter_sequence(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part of the sum over the ranks; the gradients are gathered."""
    return _move(tensor, total_part, whole_sequence, comm)


def summed(tensors: list[Tensor], comm: Communicator) -> tuple[Tensor, ...]:
    """Return parameters that each rank applies to its part of the batch; the gradients are summed in one message."""
    return _summed(comm, *tensors)
