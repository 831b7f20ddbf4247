"""Recursive halving and doubling for any number of ranks: few steps and few bytes.

S, alpha, beta and gamma are those of ``cost``; L = ceil(log2 p). Halving and doubling use a circulant graph (Träff,
"Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024). Rabenseifner's exchange
with rank XOR 2^k ("Optimization of collective reduction operations", 2004) needs a fold if p is not
a power of two; the circulant graph does not. If p is a power of two, both cost the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpctrain.comm.algorithms.base import TAG, Algorithm, exchange, offsets, slices
from hpctrain.comm.algorithms.cost import prefers_doubling
from hpctrain.comm.reduction import Reducer, partial_dtype
from hpctrain.comm.transport.base import Transport, Work


def halvings(size: int) -> list[tuple[int, int]]:
    """Return (slices kept, slices before) for each step of a halving: 5 gives (3, 5), (2, 3), (1, 2)."""
    steps, had = [], size
    while had > 1:
        steps.append(((had + 1) // 2, had))
        had = (had + 1) // 2
    return steps


@Algorithm
def reduce_scatter(transport: Transport, reducer: Reducer, out: Tensor, tensor: Tensor, op: str) -> Iterator[Work]:
    """Reduce this rank's slice of a flat tensor into ``out`` (``slices(numel, size)[rank]`` elements).

    ``out`` may be that slice itself. In every step a rank that had the slices of ranks r to r + had
    - 1 keeps the first half of them. It sends the other half to the rank of the first slice in that
    half. Steps: L. Bytes sent: S (p-1)/p. Cost: L alpha + S (p-1)/p (beta + gamma). Partial sums of
    16-bit floats are sent in float32 (twice the bytes) and are rounded at the end. Memory: 3/2 S.
    """
    rank, size = transport.rank, transport.size
    counts = slices(tensor.numel(), size)
    starts = offsets(counts[rank:] + counts[:rank])
    buffer = torch.empty(tensor.numel(), dtype=partial_dtype(tensor.dtype, op))
    _rotate(buffer, tensor, offsets(counts)[rank])
    for kept, had in halvings(size):
        own_part = buffer[: starts[had - kept]]
        arrived = torch.empty_like(own_part)
        outgoing = buffer[starts[kept] : starts[had]]
        yield from exchange(transport, outgoing, (rank + kept) % size, arrived, (rank - kept) % size)
        reducer.combine(own_part, own_part, arrived, op)
    reducer.finish(out, buffer[: starts[1]], op, size)


@Algorithm
def all_gather(transport: Transport, out: Tensor, tensor: Tensor) -> Iterator[Work]:
    """Concatenate the flat tensors of all ranks in ``out``, in rank order; they are its ``slices``.

    ``tensor`` may be its own slice of ``out``. The steps are those of a halving in reverse. Steps:
    L. Bytes sent: S (p-1)/p. Cost: L alpha + S (p-1)/p beta. Memory: S.
    """
    rank, size = transport.rank, transport.size
    counts = slices(out.numel(), size)
    starts = offsets(counts[rank:] + counts[:rank])
    buffer = torch.empty_like(out)
    buffer[: starts[1]].copy_(tensor)
    for kept, had in reversed(halvings(size)):
        outgoing, incoming = buffer[: starts[had - kept]], buffer[starts[kept] : starts[had]]
        # The receiver numbers the slices from its own on, so the slices that it lacks begin with
        # this rank's.
        yield from exchange(transport, outgoing, (rank - kept) % size, incoming, (rank + kept) % size)
    _rotate(out, buffer, out.numel() - offsets(counts)[rank])


@Algorithm
def halve_all_reduce(transport: Transport, reducer: Reducer, tensor: Tensor, op: str) -> Iterator[Work]:
    """Reduce a flat tensor over all ranks, in place: reduce-scatter by halving, then all-gather by doubling.

    Steps: 2 L. Bytes sent: 2 S (p-1)/p, the lower bound; for 16-bit floats 1.5 times as much. Cost:
    2 L alpha + S (p-1)/p (2 beta + gamma). One rank computes each slice, so that all ranks get the
    same bits. Precision as in ``reduce_scatter``; rounded results are gathered.
    """
    own = torch.split(tensor, slices(tensor.numel(), transport.size))[transport.rank]
    yield from reduce_scatter.steps(transport, reducer, own, tensor, op)
    yield from all_gather.steps(transport, tensor, own)


@Algorithm
def double_all_reduce(transport: Transport, reducer: Reducer, tensor: Tensor, op: str) -> Iterator[Work]:
    """Reduce a flat tensor over all ranks, in place, by recursive doubling: exchange whole partial results.

    The distance between partners doubles with every step. Steps: log2 p. If p is not a power of
    two, let l = floor(log2 p): the even ranks among the first 2 (p - 2^l) first send their tensors
    to their neighbours and receive the result last, which makes l + 2 steps. Bytes sent: l S, or
    (l + 1) S. Cost: steps (alpha + S beta) + L S gamma. Both partners combine the lower ranks
    first, so that all ranks get the same bits. Partial sums of 16-bit floats are sent in float32
    (twice the bytes) and are rounded at the end.
    """
    rank, size, wide = transport.rank, transport.size, partial_dtype(tensor.dtype, op)
    rest = size - (1 << (size.bit_length() - 1))
    folded = rank < 2 * rest
    if folded and rank % 2 == 0:
        yield transport.isend(tensor.to(wide), rank + 1, TAG)
        yield transport.irecv(tensor, rank + 1, TAG)
        return
    partial, arrived = tensor.to(wide), torch.empty(tensor.numel(), dtype=wide)
    if folded:
        yield transport.irecv(arrived, rank - 1, TAG)
        reducer.combine(partial, arrived, partial, op)
    number, distance = rank // 2 if folded else rank - rest, 1
    while distance < size - rest:
        other = number ^ distance
        peer = 2 * other + 1 if other < rest else other + rest
        yield from exchange(transport, partial, peer, arrived, peer)
        reducer.combine(partial, *((partial, arrived) if rank < peer else (arrived, partial)), op)
        distance *= 2
    reducer.finish(tensor, partial, op, size)
    if folded:
        yield transport.isend(tensor, rank - 1, TAG)


@Algorithm
def all_reduce(transport: Transport, reducer: Reducer, tensor: Tensor, op: str) -> Iterator[Work]:
    """Reduce a flat tensor over all ranks, in place: short tensors by doubling, others by halving and doubling."""
    nbytes = tensor.numel() * partial_dtype(tensor.dtype, op).itemsize
    chosen = double_all_reduce if prefers_doubling(transport.size, nbytes) else halve_all_reduce
    yield from chosen.steps(transport, reducer, tensor, op)


def _rotate(out: Tensor, tensor: Tensor, start: int) -> None:
    """Copy a flat tensor, rotated so that it begins with element ``start``."""
    rest = tensor.numel() - start
    out[:rest].copy_(tensor[start:])
    out[rest:].copy_(tensor[:start])
