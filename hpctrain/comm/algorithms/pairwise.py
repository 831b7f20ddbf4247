"""Pairwise exchange, one partner per step: all data are sent directly to their destination."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.comm.algorithms.base import Algorithm, exchange
from hpctrain.comm.transport.base import Transport, Work


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
