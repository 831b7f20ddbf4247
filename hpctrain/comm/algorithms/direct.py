"""Algorithms that send all data straight to their destination: reductions in rank order, and pairwise exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.comm.algorithms.base import Algorithm, exchange, slices
from hpctrain.comm.reduction import Reducer, average_scale
from hpctrain.comm.transport.base import Transport, Work


@Algorithm
def reduce_scatter(transport: Transport, reducer: Reducer, out: Tensor, tensor: Tensor, op: str) -> Iterator[Work]:
    """Reduce this rank's slice of a flat tensor into ``out`` (``slices(numel, size)[rank]`` elements).

    Steps: p - 1 messages, one to each other rank, all at once. Bytes sent per rank: S (p-1)/p. The
    result has the same bits whichever rank computes it (see the note on fixed order in
    ``reduction``).
    """
    counts = slices(tensor.numel(), transport.size)
    own = counts[transport.rank]
    received = torch.empty(own * transport.size, dtype=tensor.dtype)
    yield transport.iall_to_all(received, tensor, counts, [own] * transport.size)
    if own:
        reducer.reduce_into(out, received.view(transport.size, own).unbind(), op, average_scale(op, transport.size))


@Algorithm
def all_reduce(transport: Transport, reducer: Reducer, tensor: Tensor, op: str) -> Iterator[Work]:
    """Reduce a flat tensor over all ranks, in place: reduce-scatter, then all-gather.

    Bytes sent per rank: 2 S (p-1)/p, the lower bound. Cost: 2 (p-1) alpha + 2 S (p-1)/p beta +
    S (p-1)/p gamma (pairwise exchange: Thakur, Rabenseifner, Gropp, "Optimization of Collective
    Communication Operations in MPICH", 2005, section 4).
    """
    counts = slices(tensor.numel(), transport.size)
    own = torch.empty(counts[transport.rank], dtype=tensor.dtype)
    yield from reduce_scatter.steps(transport, reducer, own, tensor, op)
    equal = [own.numel()] * transport.size
    yield transport.iall_to_all(tensor, own.repeat(transport.size), equal, counts)


# Pairwise exchange, one partner per step: all data are sent directly to their destination -----------------------------


def partners(rank: int, size: int) -> list[tuple[int, int]]:
    """Return the destination and the source of a rank in each step; they are equal if p is a power of two."""
    if size & (size - 1) == 0:
        return [(rank ^ step, rank ^ step) for step in range(1, size)]
    return [((rank + step) % size, (rank - step) % size) for step in range(1, size)]


@Algorithm
def all_to_all(
    transport: Transport,
    out: Tensor,
    tensor: Tensor,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Iterator[Work]:
    """Send share r of a flat tensor to each rank r, and store the share received from rank r at share r of ``out``.

    Shares are equally long by default. Otherwise ``sent[r]`` elements are sent to rank r and
    ``received[r]`` elements are received from it, packed in rank order. Steps: p - 1. Bytes sent:
    S (p-1)/p, with S the bytes of the tensor. Cost: (p-1) alpha + S (p-1)/p beta. Source: Thakur,
    Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005,
    section 4.3.
    """
    rank, size = transport.rank, transport.size
    outgoing = torch.split(tensor, list(sent or [tensor.numel() // size] * size))
    incoming = torch.split(out, list(received or [out.numel() // size] * size))
    incoming[rank].copy_(outgoing[rank])
    for to, source in partners(rank, size):
        yield from exchange(transport, outgoing[to], to, incoming[source], source)
