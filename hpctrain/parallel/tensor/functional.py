"""Communication functions of tensor parallelism, with and without autograd (Megatron-LM's ``mappings``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    base, remainder = divmod(length, size)
    begin = rank * base + min(rank, remainder)
    return begin, begin + base + (rank < remainder)


def lengths(length: int, size: int) -> list[int]:
    """Return the lengths of all slices, by rank."""
    return [end - begin for begin, end in (bounds(length, rank, size) for rank in range(size))]


def degrees(length: int, limit: int = 64) -> str:
    """Return the tensor degrees, up to ``limit``, that divide a length, as text."""
    return ", ".join(str(size) for size in range(1, min(length, limit) + 1) if length % size == 0)


# Reusable buffers for in-place collectives ----------------------------------------------------------------------------
#
# Note: there is one buffer per communicator and dtype, used again and again. The caller fills it,
# calls one collective and copies the result out (which adding a bias does anyway), before any other
# operation of the communicator begins. Autograd therefore never holds the buffer. Other ranks write
# into it only inside a collective that this rank has also entered. Its address never changes, so the
# communicator can reuse its prepared call.


_BUFFERS: WeakKeyDictionary[Communicator, dict[torch.dtype, Tensor]] = WeakKeyDictionary()


def get_buffer(comm: Communicator, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a buffer of a shape, to be filled and reduced at once. Collective, with the same shape on all ranks.

    On the host the buffer belongs to the communicator; on a device it is a new tensor.
    """
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    buffers, numel = _BUFFERS.setdefault(comm, {}), prod(shape)
    buffer = buffers.get(like.dtype)
    if buffer is None or buffer.numel() < numel:
        # Such memory lives as long as the communicator. With sizes rounded up to powers of two, all buffers
        # together take at most twice the largest.
        buffer = buffers[like.dtype] = comm.empty(1 << (numel - 1).bit_length() if numel else 1, like.dtype)
    return buffer[:numel].view(*shape)


def copy_from_buffer(buffer: Tensor) -> Tensor:
    """Return the contents of a buffer from ``get_buffer`` as a tensor that the caller may keep."""
    return buffer.clone() if buffer.device.type == "cpu" else buffer


Communication = Callable[..., Tensor]


# Without autograd -----------------------------------------------------------------------------------------------------


def all_reduce(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return the sum over the ranks."""
    buffer = get_buffer(comm, tensor.shape, tensor)
    buffer.copy_(tensor)
    comm.all_reduce(buffer)
    return copy_from_buffer(buffer)


def all_reduce_together(tensors: Iterable[Tensor], comm: Communicator) -> list[Tensor]:
    """Return the sums of tensors over the ranks, by one message."""
    with torch.no_grad(), comm.bucket() as bucket:
        sums = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        for each in sums:
            bucket.all_reduce(each)
    return sums


def slice_sequence(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part of ``[batch, length, ...]`` along the length."""
    begin, end = _sequence_bounds(tensor, comm)
    return tensor[:, begin:end].contiguous()


def all_gather_sequence(part: Tensor, comm: Communicator) -> Tensor:
    """Return the whole ``[batch, length, ...]``; each rank passes its part along the length."""
    _check_dims(part)
    buffer = get_buffer(comm, (comm.size, *part.shape), part)
    buffer[comm.rank].copy_(part)
    comm.all_gather(buffer, buffer[comm.rank])
    whole = torch.empty(part.shape[0], comm.size, *part.shape[1:], dtype=part.dtype, device=part.device)
    return whole.copy_(buffer.transpose(0, 1)).flatten(1, 2)


def reduce_scatter_buffers(tensor: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return a buffer with the parts of ``[batch, length, ...]`` in rank order, and a new tensor for one of them."""
    _sequence_bounds(tensor, comm)
    batch, length, *rest = tensor.shape
    parts = tensor.view(batch, comm.size, length // comm.size, *rest).transpose(0, 1)
    buffer = get_buffer(comm, parts.shape, tensor)
    buffer.copy_(parts)
    return buffer, torch.empty(parts.shape[1:], dtype=tensor.dtype, device=tensor.device)


def reduce_scatter_sequence(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part, along the length, of the sum of ``[batch, length, ...]`` over the ranks."""
    buffer, part = reduce_scatter_buffers(tensor.contiguous(), comm)
    comm.reduce_scatter(part, buffer)
    return part


def all_gather_outputs(part: Tensor, features: int, comm: Communicator) -> Tensor:
    """Return the whole ``[..., features]``; each rank passes its slice, with the length from ``bounds``."""
    own, *rest = sizes = lengths(features, comm.size)
    # The buffer has equal slots. A slice that is one shorter leaves the last element of each row unset.
    buffer = get_buffer(comm, (comm.size, *part.shape[:-1], own), part)
    buffer[comm.rank][..., : part.shape[-1]].copy_(part)
    comm.all_gather(buffer, buffer[comm.rank])
    return torch.cat([buffer[rank][..., :size] for rank, size in enumerate(sizes)], dim=-1)


def _sequence_bounds(tensor: Tensor, comm: Communicator) -> tuple[int, int]:
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


class _Communicate(torch.autograd.Function):
    """Communication of a tensor forward and of its gradient backward, by two functions with common arguments."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward_function: Communication, backward_function: Communication, *arguments: Any
    ) -> Tensor:
        ctx.backward_function, ctx.arguments = backward_function, arguments
        # Ranks use a result differently if its gradient is summed.
        ctx.varies = backward_function in (all_reduce, reduce_scatter_sequence)
        return forward_function(tensor, *arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.backward_function(grad.contiguous(), *ctx.arguments), None, None, *[None] * len(ctx.arguments)


class _SumGradients(torch.autograd.Function):
    """Identity forward; sums the gradients over the ranks backward, in one message."""

    varies = True

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: Tensor) -> Any:
        ctx.comm = comm
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *all_reduce_together(grads, ctx.comm)


def _identity(tensor: Tensor, *_: Any) -> Tensor:
    return tensor.view_as(tensor)


def _slice_outputs(whole: Tensor, features: int, comm: Communicator) -> Tensor:
    begin, end = bounds(features, comm.rank, comm.size)
    return whole[..., begin:end].contiguous()


_communicate: Communication = _Communicate.apply
_sum_gradients: Callable[..., tuple[Tensor, ...]] = _SumGradients.apply


def copy_to_tensor_model_parallel_region(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return a tensor that all ranks hold alike, unchanged; the gradient is summed over the ranks."""
    return _communicate(tensor, _identity, all_reduce, comm)


def reduce_from_tensor_model_parallel_region(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return the sum over the ranks, which all ranks use alike; the gradient passes unchanged."""
    return _communicate(tensor, all_reduce, _identity, comm)


def gather_from_tensor_model_parallel_region(part: Tensor, features: int, comm: Communicator) -> Tensor:
    """Return all ranks' slices along the last dim; the gradient of each is its slice."""
    return _communicate(part, all_gather_outputs, _slice_outputs, features, comm)


def scatter_to_sequence_parallel_region(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part of a sequence that all ranks hold; the gradients are gathered."""
    return _communicate(tensor, slice_sequence, all_gather_sequence, comm)


def gather_from_sequence_parallel_region(
    part: Tensor, comm: Communicator, *, tensor_parallel_output_grad: bool = True
) -> Tensor:
    """Return the whole sequence. If each rank uses it differently, the gradient is this rank's part of the sum.

    Without ``tensor_parallel_output_grad``, all ranks use it alike, and the gradient is this rank's part.
    """
    backward = reduce_scatter_sequence if tensor_parallel_output_grad else slice_sequence
    return _communicate(part, all_gather_sequence, backward, comm)


def reduce_scatter_to_sequence_parallel_region(tensor: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part of the sum over the ranks; the gradients are gathered."""
    return _communicate(tensor, reduce_scatter_sequence, all_gather_sequence, comm)


def copy_parameters_to_region(tensors: list[Tensor], comm: Communicator) -> tuple[Tensor, ...]:
    """Return parameters that each rank applies to its part of the batch; the gradients are summed in one message."""
    return _sum_gradients(comm, *tensors)
