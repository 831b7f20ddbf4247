"""Reduction by exchange of slices and summation in rank order, for reductions that MPI lacks, over any transport."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpctrain.comm.reduction import Reducer, average_scale
from hpctrain.comm.transport.base import Chain, Transport, Work


def slices(numel: int, size: int) -> list[int]:
    """Return the number of elements of each rank's slice: nearly equal, the first ones larger."""
    share, rest = divmod(numel, size)
    return [share + (rank < rest) for rank in range(size)]


def reduce_scatter(transport: Transport, reducer: Reducer, out: Tensor, tensor: Tensor, op: str) -> None:
    """Reduce this rank's slice of a flat tensor into ``out`` (``slices(numel, size)[rank]`` elements).

    Steps: p - 1 messages, one to each other rank, all at once. Bytes sent per rank: S (p-1)/p. The
    result has the same bits whichever rank computes it (see the note on fixed order in
    ``reduction``).
    """
    Chain(reduce_scatter_steps(transport, reducer, out, tensor, op)).wait()


def reduce_scatter_steps(
    transport: Transport, reducer: Reducer, out: Tensor, tensor: Tensor, op: str
) -> Iterator[Work]:
    """Yield the works that a ``reduce_scatter`` must wait for."""
    counts = slices(tensor.numel(), transport.size)
    own = counts[transport.rank]
    received = torch.empty(own * transport.size, dtype=tensor.dtype)
    yield transport.iall_to_all(received, tensor, counts, [own] * transport.size)
    _reduce(transport, reducer, out, received, op)


def all_reduce(transport: Transport, reducer: Reducer, tensor: Tensor, op: str) -> None:
    """Reduce a flat tensor over all ranks, in place: reduce-scatter, then all-gather."""
    start_all_reduce(transport, reducer, tensor, op).wait()


def start_all_reduce(transport: Transport, reducer: Reducer, tensor: Tensor, op: str) -> Work:
    """Start to reduce a flat tensor over all ranks, in place; it progresses when ``done`` or ``wait`` is called.

    Bytes sent per rank: 2 S (p-1)/p, the lower bound. Cost: 2 (p-1) alpha + 2 S (p-1)/p beta +
    S (p-1)/p gamma (pairwise exchange: Thakur, Rabenseifner, Gropp, "Optimization of Collective
    Communication Operations in MPICH", 2005, section 4). Only one may be in progress per transport.
    """
    return Chain(_exchanges(transport, reducer, tensor, op))


def _exchanges(transport: Transport, reducer: Reducer, tensor: Tensor, op: str) -> Iterator[Work]:
    counts = slices(tensor.numel(), transport.size)
    own = torch.empty(counts[transport.rank], dtype=tensor.dtype)
    equal = [own.numel()] * transport.size
    received = torch.empty(sum(equal), dtype=tensor.dtype)
    yield transport.iall_to_all(received, tensor, counts, equal)
    _reduce(transport, reducer, own, received, op)
    yield transport.iall_to_all(tensor, own.repeat(transport.size), equal, counts)


def _reduce(transport: Transport, reducer: Reducer, out: Tensor, received: Tensor, op: str) -> None:
    if out.numel():
        pieces = received.view(transport.size, out.numel()).unbind()
        reducer.reduce_into(out, pieces, op, average_scale(op, transport.size))
