"""Order in which the gradients of microbatches are added: a fixed binary tree, which the number of ranks cannot change.

Note: the tree. Its leaves are the microbatches of a step. A node of level k covers 2**k consecutive
microbatches, and its sum is that of its left half plus that of its right half. A half without
microbatches is left out. The order of all additions thus follows from the number of microbatches.

A rank computes consecutive microbatches and adds what makes up whole nodes (``subtrees``): at most
2 log2(M) sums for M microbatches, and one if the number of ranks divides M into a power of two. The
sums of all ranks are then added along the rest of the tree (``TreeOrder``). A missing gradient
counts as zeros. Floating-point addition is commutative, so either operand may be the first one.
Whether a zero is -0 may depend on the ranks until the final sum, to which 0 is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Range = tuple[int, int]  # microbatches from, to

HALF = (torch.float16, torch.bfloat16)
BLOCK = 131072  # elements per addition: the operands of one stay in the caches until the next


def share_of_rank(microbatches: int, rank: int, ranks: int) -> Range:
    """Return the microbatches that a rank computes; the numbers of the ranks differ by at most one."""
    return microbatches * rank // ranks, microbatches * (rank + 1) // ranks


def subtrees(begin: int, end: int, microbatches: int) -> list[Range]:
    """Return the fewest nodes of the tree that cover a range of microbatches, in order."""
    found = []
    while begin < end:
        size = 1
        while begin % (2 * size) == 0 and begin + size < end and min(begin + 2 * size, microbatches) <= end:
            size *= 2
        found.append((begin, min(begin + size, end)))
        begin += size
    return found


def are_siblings(left: Range, right: Range, microbatches: int) -> bool:
    """Return whether two adjacent nodes are the halves of one node."""
    (begin, middle), (_, end) = left, right
    size = middle - begin
    return size & (size - 1) == 0 and begin % (2 * size) == 0 and end == min(begin + 2 * size, microbatches)


@dataclass(frozen=True)
class Addition:
    """One addition of two operands: numbers of sums, or ``RESULT - n`` for the result (n = 0) and scratch memory n."""

    target: int
    left: int
    right: int


RESULT = -1


class TreeOrder:
    """Additions that combine the sums of all nodes in ``parts``, which cover the tree, into the sum of the tree."""

    def __init__(self, parts: Sequence[Range], microbatches: int) -> None:
        self._parts = {part: number for number, part in enumerate(parts)}
        self._microbatches = microbatches
        self.additions: list[Addition] = []
        self.depth = 0  # scratch blocks that are needed
        size = 1
        while size < microbatches:
            size *= 2
        self.only = self._parts.get((0, microbatches))  # the number of the only part, if it is the whole tree
        if self.only is None:
            self._add(0, size, 0)

    def _add(self, begin: int, size: int, scratch: int) -> int:
        """Plan the sum of a node; return its operand. Additions below it use scratch memory from this number on."""
        end = min(begin + size, self._microbatches)
        found = self._parts.get((begin, end))
        if found is not None:
            return found
        half = size // 2
        left = self._add(begin, half, scratch)
        if begin + half >= end:
            return left
        # The sum of the left half stays in the memory of this node while the right half is computed.
        right = self._add(begin + half, half, scratch + (left == RESULT - scratch))
        target = RESULT - scratch
        self.additions.append(Addition(target, left, right))
        self.depth = max(self.depth, scratch)
        return target

    def sum_into(self, out: Tensor, parts: Sequence[Tensor], scratch: Tensor) -> None:
        """Write the sum of flat tensors into ``out``, whose memory is its own.

        They are in the order of ``parts`` at construction. ``scratch`` has at least ``depth`` rows of
        ``BLOCK`` elements.
        """
        if self.only is not None:
            out.copy_(parts[self.only])
            return
        for start in range(0, out.numel(), BLOCK):
            result = out[start : start + BLOCK]
            numel = result.numel()

            def operand(number: int) -> Tensor:
                if number >= 0:
                    return parts[number][start : start + numel]
                return result if number == RESULT else scratch[RESULT - number - 1][:numel]

            for each in self.additions:
                torch.add(operand(each.left), operand(each.right), out=operand(each.target))


@dataclass(frozen=True)
class Division:
    """Division of a step's microbatches over the ranks, and the order in which the ranks' sums are added."""

    microbatches: int
    ranks: int
    parts: tuple[tuple[Range, ...], ...]  # the nodes whose sums each rank holds
    order: TreeOrder

    @property
    def most(self) -> int:
        """Return the largest number of sums that a rank holds."""
        return max(map(len, self.parts))


@lru_cache(maxsize=64)
def divide(microbatches: int, ranks: int) -> Division:
    """Return the division of microbatches over ranks; a rank has none if there are more ranks than microbatches."""
    parts = tuple(tuple(subtrees(*share_of_rank(microbatches, rank, ranks), microbatches)) for rank in range(ranks))
    return Division(microbatches, ranks, parts, TreeOrder([one for held in parts for one in held], microbatches))


class LocalSums:
    """Sums of the gradients of a rank's microbatches, by name, one dict per node of the tree.

    Microbatches are added in order. The gradients become property of this object and are changed.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self.nodes: list[Range] = []
        self.sums: list[dict[str, Tensor]] = []

    def add(self, microbatches: Range, gradients: dict[str, Tensor]) -> None:
        """Add the gradients of the next microbatch or pair of siblings; 16-bit floats are converted to float32."""
        wide = {name: one.float() if one.dtype in HALF else one for name, one in gradients.items()}
        self.nodes.append(microbatches)
        self.sums.append(wide)
        while len(self.nodes) > 1 and are_siblings(self.nodes[-2], self.nodes[-1], self._microbatches):
            (begin, _), (_, end) = self.nodes[-2:]
            right = self.sums.pop()
            self.nodes[-2:] = [(begin, end)]
            _add_to(self.sums[-1], right)


@torch.no_grad()
def _add_to(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Add gradients to those of the left sibling; a missing one counts as zeros."""
    both = [name for name in left if name in right]
    if both:
        torch._foreach_add_([left[name] for name in both], [right[name] for name in both])
    left.update({name: one for name, one in right.items() if name not in left})
