"""Reduce by exchanging slices and adding in rank order: for what MPI does not reduce, over any transport."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.collectives.reduction import Reducer, carrier_op
from hpctrain.transport.base import Transport


def slices(numel: int, size: int) -> list[int]:
    """Return how many elements each rank owns: as equal as can be, the first ones larger."""
    share, rest = divmod(numel, size)
    return [share + (rank < rest) for rank in range(size)]


def reduce_scatter(transport: Transport, reducer: Reducer, out: Tensor, tensor: Tensor, op: str) -> None:
    """Reduce this rank's slice of a flat tensor into ``out`` (``slices(numel, size)[rank]`` elements).

    Steps: p - 1 messages to each of the others at once. Bytes sent per rank: S (p-1)/p. The result is the same bits
    whichever rank computes it (see the note on fixed order in ``reduction``).
    """
    counts = slices(tensor.numel(), transport.size)
    own = counts[transport.rank]
    received = torch.empty(own * transport.size, dtype=tensor.dtype)
    transport.all_to_all(received, tensor, counts, [own] * transport.size)
    if own:
        reducer.reduce_into(out, received.view(transport.size, own).unbind(), carrier_op(op))


def all_reduce(transport: Transport, reducer: Reducer, tensor: Tensor, op: str) -> None:
    """Reduce a flat tensor over all ranks, in place: reduce-scatter, then all-gather.

    Bytes sent per rank: 2 S (p-1)/p, the lower bound. Cost: 2 (p-1) alpha + 2 S (p-1)/p beta + S (p-1)/p gamma
    (pairwise exchange: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
    2005, section 4).
    """
    counts = slices(tensor.numel(), transport.size)
    own = torch.empty(counts[transport.rank], dtype=tensor.dtype)
    reduce_scatter(transport, reducer, own, tensor, op)
    copies = own.repeat(transport.size)
    transport.all_to_all(tensor, copies, [own.numel()] * transport.size, counts)
