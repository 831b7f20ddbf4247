"""Double-tree algorithms: each tree carries half of the tensor; full bandwidth, O(log p) steps.

Source: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009. Ranks are numbered from the root, which is the root of both trees. The others form a
binary tree in which every odd number is a leaf. In the second tree all numbers are shifted by one,
so that a rank with children in one tree is a leaf in the other. Therefore each rank receives S
bytes and sends at most S.

S, alpha, beta and gamma are those of ``cost``. The S bytes are cut into k segments over both trees.
h = floor(log2(p-1)) is the height of a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from hpctrain.comm.algorithms.base import TAG, Algorithm, cut, slices
from hpctrain.comm.algorithms.cost import best_segment, tree_height
from hpctrain.comm.reduction import Reducer, average_scale, partial_dtype
from hpctrain.comm.transport.base import Transport, Work

TREES = 2


def parent_of(role: int, count: int) -> int:
    """Return the parent of a role, from 1 to ``count``, in the binary tree; 0, the root, for the top."""
    low = role & -role
    up = (role ^ low) | (low << 1)
    return up if up <= count else role ^ low


def children_of(role: int, count: int) -> list[int]:
    """Return the children of a role: the lower one, and the higher one if it exists."""
    result, reach = [], (role & -role) >> 1
    if reach:
        result.append(role - reach)
    while reach and role + reach > count:
        reach >>= 1
    return result + ([role + reach] if reach else [])


@dataclass(frozen=True)
class TreePosition:
    """Position of a rank in one tree: its neighbours, the tag of the tree, and the half of the tensor to send."""

    parent: int
    children: tuple[int, ...]
    tag: int
    pieces: Sequence[Tensor]


def neighbours(vrank: int, size: int, tree: int) -> tuple[int, tuple[int, ...]]:
    """Return parent and children of a rank in tree 0 or 1; all are numbered from the root, 0."""
    count = size - 1
    if not vrank:
        top = 1 << count.bit_length() >> 1
        return 0, ((top + tree - 1) % count + 1,) if count else ()
    role = (vrank - 1 - tree) % count + 1
    up, down = parent_of(role, count), children_of(role, count)
    return (up + tree - 1) % count + 1 if up else 0, tuple((child + tree - 1) % count + 1 for child in down)


def positions(
    transport: Transport, tensor: Tensor, root: int, segment: int | None, itemsize: int
) -> list[TreePosition]:
    """Return this rank's positions in both trees."""
    size, vrank = transport.size, (transport.rank - root) % transport.size
    segment = segment or best_segment(tensor.numel() * itemsize, 2 * tree_height(size))
    result = []
    for tree, half in enumerate(torch.split(tensor, slices(tensor.numel(), TREES))):
        up, down = neighbours(vrank, size, tree)
        children = tuple((child + root) % size for child in down)
        result.append(TreePosition((up + root) % size, children, TAG - tree, cut(half, segment, itemsize)))
    return result


@Algorithm
def broadcast(transport: Transport, tensor: Tensor, root: int = 0, segment: int | None = None) -> Iterator[Work]:
    """Copy the root's flat tensor to every rank, in place.

    Steps: k + 2 h. Bytes sent: S by the root, at most S by others. Cost: (k + 2 h) (alpha + S/k
    beta), which is about S beta + 2 h alpha + sqrt(8 h alpha S beta) at the best ``segment``
    (bytes; selected by default).
    """
    trees = positions(transport, tensor, root, segment, tensor.itemsize)
    sends: list[Work] = []
    if transport.rank == root:
        for pair in zip_longest(*(tree.pieces for tree in trees)):
            for tree, piece in zip(trees, pair):
                if piece is not None:
                    sends += [transport.isend(piece, child, tree.tag) for child in tree.children]
        yield from sends
        return
    receives = [[transport.irecv(piece, tree.parent, tree.tag) for piece in tree.pieces] for tree in trees]
    # First serve the tree in which other ranks wait for this one. Waiting for both trees in turn
    # would couple them, and each segment would travel through both.
    for number in sorted(range(TREES), key=lambda number: not trees[number].children):
        for piece, work in zip(trees[number].pieces, receives[number]):
            yield work
            sends += [transport.isend(piece, child, trees[number].tag) for child in trees[number].children]
    yield from sends


@Algorithm
def reduce(
    transport: Transport, reducer: Reducer, tensor: Tensor, op: str, root: int = 0, segment: int | None = None
) -> Iterator[Work]:
    """Reduce a flat tensor over all ranks into the root's tensor, in place; other ranks' tensors are unchanged.

    This is the reverse of the broadcast. Steps: k + 2 h. Bytes sent: S by every rank but the root.
    Cost: (k + 2 h) (alpha + S/k (beta + gamma)). Within a tree a rank adds its lower child, itself,
    its higher child. Partial sums of 16-bit floats are sent in float32 (twice the bytes) and are
    rounded by the root alone. Memory: S.
    """
    wide = partial_dtype(tensor.dtype, op)
    trees = positions(transport, tensor, root, segment, wide.itemsize)
    steps = _reduce_at_root if transport.rank == root else _send_up
    yield from steps(transport, reducer, trees, op, wide)


@Algorithm
def all_reduce(
    transport: Transport, reducer: Reducer, tensor: Tensor, op: str, segment: int | None = None
) -> Iterator[Work]:
    """Reduce a flat tensor over all ranks, in place: reduce to rank 0, then broadcast from it.

    Steps: 2 (k + 2 h). Bytes sent: at most 2 S. Cost: (k + 2 h) (2 alpha + S/k (2 beta + gamma)).
    One rank computes the result, so that all ranks get the same bits. Precision as in ``reduce``;
    the rounded result is broadcast.
    """
    yield from reduce.steps(transport, reducer, tensor, op, 0, segment)
    yield from broadcast.steps(transport, tensor, 0, segment)


def _receive_from_children(
    transport: Transport, tree: TreePosition, wide: torch.dtype
) -> list[list[tuple[Tensor, Work]]]:
    """Start to receive all data that the children in a tree will send."""
    rows = []
    for child in tree.children:
        pieces = [torch.empty(piece.numel(), dtype=wide) for piece in tree.pieces]
        rows.append([(piece, transport.irecv(piece, child, tree.tag)) for piece in pieces])
    return rows


def _reduce_at_root(
    transport: Transport, reducer: Reducer, trees: Sequence[TreePosition], op: str, wide: torch.dtype
) -> Iterator[Work]:
    """Add the partial results from the tops of both trees to the root's own tensor."""
    scale = average_scale(op, transport.size)
    receives = [row for tree in trees for row in _receive_from_children(transport, tree, wide)]
    for number, column in enumerate(zip_longest(*receives)):
        for tree, item in zip(trees, column):
            if item is not None:
                own, (piece, work) = tree.pieces[number], item
                yield work
                reducer.reduce_into(own, (own, piece), op, scale)


def _send_up(
    transport: Transport, reducer: Reducer, trees: Sequence[TreePosition], op: str, wide: torch.dtype
) -> Iterator[Work]:
    """Send own data in the tree where this rank is a leaf; combine and forward its children's data in the other."""
    leaves = [tree for tree in trees if not tree.children]
    rows = zip_longest(*(leaf.pieces for leaf in leaves))
    outgoing = iter([(piece, leaf) for row in rows for piece, leaf in zip(row, leaves) if piece is not None])
    sends: list[Work] = []

    def send_leaves(number: int) -> None:
        for piece, leaf in (pair for _, pair in zip(range(number), outgoing)):
            sends.append(transport.isend(piece.to(wide), leaf.parent, leaf.tag))

    # The messages of the leaf alternate with those forwarded in the other tree, so that neither
    # delays the other. The initial lead keeps the other tree busy while the first segments climb
    # this one.
    send_leaves(max(2, tree_height(transport.size)))
    for tree in trees:
        receives = _receive_from_children(transport, tree, wide)
        for number, own in enumerate(tree.pieces if tree.children else ()):
            partial = own
            for above, (piece, work) in enumerate(row[number] for row in receives):
                yield work
                reducer.combine(piece, *((partial, piece) if above else (piece, partial)), op)
                partial = piece
            sends.append(transport.isend(partial, tree.parent, tree.tag))
            send_leaves(1)
    send_leaves(sum(len(tree.pieces) for tree in trees))
    yield from sends
