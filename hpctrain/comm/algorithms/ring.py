"""Ring algorithms: send to the right neighbour, receive from the left; fewest bytes, O(p) steps.

S, alpha, beta and gamma are those of ``cost``. Source of the reductions: Patarasuk, Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009. Source of the pipeline: Sanders, Speck, Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpctrain.comm.algorithms.base import TAG, Algorithm, copy_unless_same, cut, slices
from hpctrain.comm.algorithms.cost import RING_SEGMENT, best_segment
from hpctrain.comm.reduction import Reducer, average_scale, partial_dtype
from hpctrain.comm.transport.base import Transport, Work


@Algorithm
def broadcast(transport: Transport, tensor: Tensor, root: int = 0, segment: int | None = None) -> Iterator[Work]:
    """Copy the root's flat tensor to every rank, in place, in k segments that are pipelined along the ring.

    Steps: p - 2 + k. Bytes sent: S by every rank but the last. Cost: (p - 2 + k) (alpha + S/k
    beta), which is (sqrt((p-2) alpha) + sqrt(S beta))^2 at the best ``segment`` (bytes; selected by
    default).
    """
    rank, size = transport.rank, transport.size
    nbytes = tensor.numel() * tensor.itemsize
    pieces = cut(tensor, segment or best_segment(nbytes, size - 2), tensor.itemsize)
    left, right = (rank - 1) % size, (rank + 1) % size
    receives = [transport.irecv(piece, left, TAG) for piece in pieces] if rank != root else []
    sends = []
    for number, piece in enumerate(pieces):
        if receives:
            yield receives[number]
        if right != root:
            sends.append(transport.isend(piece, right, TAG))
    yield from sends


@Algorithm
def reduce_scatter(
    transport: Transport, reducer: Reducer, out: Tensor, tensor: Tensor, op: str, segment: int = RING_SEGMENT
) -> Iterator[Work]:
    """Reduce this rank's slice of a flat tensor into ``out`` (``slices(numel, size)[rank]`` elements).

    ``out`` may be that slice itself. Slice c starts at rank c + 1, and every rank on its way to
    rank c adds its own part. A slice longer than ``segment`` bytes is sent in several messages, so
    that one is reduced while the next is in transit. Steps: p - 1 of k messages each. Bytes sent:
    S (p-1)/p. Cost: (p-1) k alpha + S (p-1)/p (beta + gamma). Partial sums of 16-bit floats are
    sent in float32 (twice the bytes) and are rounded at the end. Memory: 2 S/p.
    """
    rank, size = transport.rank, transport.size
    chunks = torch.split(tensor, slices(tensor.numel(), size))
    wide = partial_dtype(tensor.dtype, op)
    left, right, scale = (rank - 1) % size, (rank + 1) % size, average_scale(op, size)
    if size == 1:
        reducer.finish(out, tensor, op, size)
        return
    buffer = torch.empty(2, chunks[0].numel(), dtype=wide)
    before: list[Work] = []
    sends = [transport.isend(piece, right, TAG) for piece in cut(chunks[left].to(wide), segment, wide.itemsize)]
    for step in range(2, size + 1):
        own_part = chunks[(rank - step) % size]
        yield from before  # these sends read the buffer that is filled next
        pieces = cut(buffer[step % 2, : own_part.numel()], segment, wide.itemsize)
        receives = [transport.irecv(piece, left, TAG) for piece in pieces]
        before, sends = sends, []
        results = cut(out, segment, wide.itemsize) if step == size else pieces
        for piece, own, result, work in zip(pieces, cut(own_part, segment, wide.itemsize), results, receives):
            yield work
            if step == size:
                reducer.reduce_into(result, (piece, own), op, scale)
            else:
                reducer.combine(piece, piece, own, op)
                sends.append(transport.isend(piece, right, TAG))
    yield from before


@Algorithm
def all_gather(transport: Transport, out: Tensor, tensor: Tensor) -> Iterator[Work]:
    """Concatenate the flat tensors of all ranks in ``out``, in rank order; they are its ``slices``.

    ``tensor`` may be its own slice of ``out``. Steps: p - 1. Bytes sent: S (p-1)/p. Cost:
    (p-1) alpha + S (p-1)/p beta.
    """
    rank, size = transport.rank, transport.size
    chunks = torch.split(out, slices(out.numel(), size))
    left, right = (rank - 1) % size, (rank + 1) % size
    sources = [(rank - step) % size for step in range(1, size)]
    receives = [transport.irecv(chunks[source], left, TAG) for source in sources]
    copy_unless_same(chunks[rank], tensor)
    sends = [transport.isend(chunks[rank], right, TAG)] if size > 1 else []
    for source, work in zip(sources, receives):
        yield work
        if source != right:
            sends.append(transport.isend(chunks[source], right, TAG))
    yield from sends


@Algorithm
def all_reduce(
    transport: Transport, reducer: Reducer, tensor: Tensor, op: str, segment: int = RING_SEGMENT
) -> Iterator[Work]:
    """Reduce a flat tensor over all ranks, in place: reduce-scatter, then all-gather.

    Steps: 2 (p-1), the first half of k messages each. Bytes sent: 2 S (p-1)/p, the lower bound; for
    16-bit floats 1.5 times as much. Cost: (p-1) (k + 1) alpha + S (p-1)/p (2 beta + gamma). One
    rank computes each slice, so that all ranks get the same bits. Precision as in
    ``reduce_scatter``; rounded results are gathered.
    """
    own = torch.split(tensor, slices(tensor.numel(), transport.size))[transport.rank]
    yield from reduce_scatter.steps(transport, reducer, own, tensor, op, segment)
    yield from all_gather.steps(transport, tensor, own)
