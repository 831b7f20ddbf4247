"""Sums in the order of a binary tree, written apart from the product, and numbers that show the order."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_sum(leaves: list[Tensor]) -> Tensor:
    """Return the sum of a binary tree, written as recursion over a list that is padded to a power of two."""
    size = 1
    while size < len(leaves):
        size *= 2

    def of(begin: int, length: int) -> Tensor | None:
        if length == 1:
            return leaves[begin] if begin < len(leaves) else None
        left, right = of(begin, length // 2), of(begin + length // 2, length // 2)
        return left if right is None or left is None else left + right

    total = of(0, size)
    assert total is not None
    return total


def wild_numbers(count: int, numel: int = 50) -> list[Tensor]:
    """Return tensors whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(count)
    scales = 10.0 ** torch.randint(-6, 7, (count, numel), generator=generator)
    return list((torch.randn(count, numel, generator=generator) * scales).unbind())
