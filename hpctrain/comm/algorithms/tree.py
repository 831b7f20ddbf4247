"""Binomial-tree algorithms: fewest steps, for messages whose latency outweighs their bytes.

Ranks are numbered from the root. The parent of rank v is v without its lowest bit set, so that the
subtree of v contains the ranks v to v + lowest bit - 1. Depth: L = ceil(log2 p). Source: Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, sections
4.2 and 4.4.
S, alpha, beta and gamma are those of ``cost``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpctrain.comm.algorithms.base import TAG, Algorithm
from hpctrain.comm.reduction import Reducer, partial_dtype
from hpctrain.comm.transport.base import TensorTransport, Transport, Work


def subtree(vrank: int, size: int) -> int:
    """Return the number of ranks in the subtree of a rank, including the rank itself."""
    return min(vrank & -vrank, size - vrank) if vrank else size


def children(vrank: int, size: int) -> list[int]:
    """Return the children of a rank, the smallest subtree first."""
    reach, result, distance = subtree(vrank, size), [], 1
    while distance < reach:
        result.append(vrank + distance)
        distance *= 2
    return result


def parent(vrank: int) -> int:
    """Return the parent of a rank that is not the root."""
    return vrank & (vrank - 1)


@Algorithm
def broadcast(transport: Transport, tensor: Tensor, root: int = 0) -> Iterator[Work]:
    """Copy the root's flat tensor to every rank, in place.

    Steps: L. Bytes sent by the root: L S. Cost: L (alpha + S beta).
    """
    size, vrank = transport.size, (transport.rank - root) % transport.size
    if vrank:
        yield transport.irecv(tensor, (parent(vrank) + root) % size, TAG)
    # Send to the largest subtree first: it is the deepest.
    sends = [transport.isend(tensor, (child + root) % size, TAG) for child in reversed(children(vrank, size))]
    yield from sends


@Algorithm
def reduce(transport: Transport, reducer: Reducer, tensor: Tensor, op: str, root: int = 0) -> Iterator[Work]:
    """Reduce a flat tensor over all ranks into the root's tensor, in place; other ranks' tensors are unchanged.

    Steps: L. Bytes sent: S by every rank but the root. Cost: L (alpha + S beta + S gamma). Memory:
    S per child. A rank adds the subtrees of its children in rank order, counted from the root.
    Partial sums of 16-bit floats are sent in float32 (twice the bytes) and are rounded by the root
    alone.
    """
    size, vrank = transport.size, (transport.rank - root) % transport.size
    wide, partial = partial_dtype(tensor.dtype, op), tensor
    below = children(vrank, size)
    pieces = [torch.empty(tensor.numel(), dtype=wide) for _ in below]
    receives = [transport.irecv(piece, (child + root) % size, TAG) for child, piece in zip(below, pieces)]
    for piece, work in zip(pieces, receives):
        yield work
        reducer.combine(piece, partial, piece, op)
        partial = piece
    if vrank:
        yield transport.isend(partial.to(wide), (parent(vrank) + root) % size, TAG)
    else:
        reducer.finish(tensor, partial, op, size)


@Algorithm
def all_reduce(transport: Transport, reducer: Reducer, tensor: Tensor, op: str) -> Iterator[Work]:
    """Reduce a flat tensor over all ranks, in place: reduce to rank 0, then broadcast from it.

    Steps: 2 L. Bytes sent by rank 0: L S; by each other rank at most as many. Cost: L (2 alpha +
    2 S beta + S gamma). One rank computes the result, so that all ranks get the same bits.
    Precision as in ``reduce``; the rounded result is broadcast.
    """
    yield from reduce.steps(transport, reducer, tensor, op)
    yield from broadcast.steps(transport, tensor)


@Algorithm
def gather(transport: TensorTransport, out: Tensor | None, tensor: Tensor, root: int = 0) -> Iterator[Work]:
    """Concatenate the equally long flat tensors of all ranks in the root's ``out``, in rank order.

    Only the root passes ``out``. Steps: L. Bytes received by the root: S (p-1)/p. Cost: L alpha +
    S (p-1)/p beta.
    """
    size, vrank, share = transport.size, (transport.rank - root) % transport.size, tensor.numel()
    direct = out is not None and vrank == 0 == root
    buffer = out if direct and out is not None else tensor.new_empty(subtree(vrank, size) * share)
    receives = []
    for child in children(vrank, size):
        start, length = (child - vrank) * share, subtree(child, size) * share
        receives.append(transport.irecv(buffer[start : start + length], (child + root) % size, TAG))
    buffer[:share].copy_(tensor)
    yield from receives
    if vrank:
        yield transport.isend(buffer, (parent(vrank) + root) % size, TAG)
    elif out is not None and not direct:
        out.copy_(buffer.roll(root * share))


@Algorithm
def scatter(transport: TensorTransport, out: Tensor, tensor: Tensor | None, root: int = 0) -> Iterator[Work]:
    """Copy share ``rank`` of the root's flat tensor to each rank's ``out``; all shares are equally long.

    Only the root passes ``tensor``. Steps: L. Bytes sent by the root: S (p-1)/p. Cost: L alpha +
    S (p-1)/p beta.
    """
    size, vrank, share = transport.size, (transport.rank - root) % transport.size, out.numel()
    if vrank:
        buffer = out.new_empty(subtree(vrank, size) * share)
        yield transport.irecv(buffer, (parent(vrank) + root) % size, TAG)
    else:
        assert tensor is not None, "the root has what is scattered"
        buffer = tensor.roll(-root * share) if root else tensor
    sends = []
    for child in reversed(children(vrank, size)):
        start, length = (child - vrank) * share, subtree(child, size) * share
        sends.append(transport.isend(buffer[start : start + length], (child + root) % size, TAG))
    out.copy_(buffer[:share])
    yield from sends
