"""Order of additions over microbatches: it is one binary tree, however the microbatches are divided over the ranks."""

from __future__ import annotations

import pytest
import torch
from support.tree_sums import tree_sum, wild_numbers
from torch import Tensor

from hpctrain.parallel.reproducible.tree import BLOCK, LocalSums, divide, share_of_rank, subtrees

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 23)


def summed(leaves: list[Tensor], ranks: int) -> Tensor:
    """Return the sum as a number of ranks would compute it."""
    count = len(leaves)
    parts: list[Tensor] = []
    division = divide(count, ranks)
    for rank in range(ranks):
        local = LocalSums(count)
        for index in range(*share_of_rank(count, rank, ranks)):
            local.add((index, index + 1), {"w": leaves[index].clone()})
        assert tuple(local.nodes) == division.parts[rank]
        parts += [each["w"] for each in local.sums]
    out = torch.empty_like(leaves[0])
    division.order.sum_into(out, parts, torch.empty(division.order.depth, BLOCK))
    return out


@pytest.mark.parametrize("count", COUNTS)
def test_the_sum_is_that_of_one_tree_for_every_number_of_ranks(count: int) -> None:
    leaves = wild_numbers(count)
    expected = tree_sum(leaves)
    for ranks in range(1, count + 3):
        assert torch.equal(summed(leaves, ranks), expected), ranks


def test_these_numbers_have_other_sums_in_other_orders() -> None:
    leaves = wild_numbers(8)
    assert not torch.equal(sum(leaves[1:], leaves[0]), tree_sum(leaves))


def test_blocks_are_added_alike() -> None:
    leaves = wild_numbers(5, 2 * BLOCK + 7)
    assert torch.equal(summed(leaves, 4), tree_sum(leaves))


@pytest.mark.parametrize("count", (*COUNTS, 64, 100))
def test_a_rank_holds_few_sums(count: int) -> None:
    for ranks in range(1, count + 1):
        division = divide(count, ranks)
        assert division.most <= max(2 * (count - 1).bit_length(), 1)
        share = count // ranks
        if count % ranks == 0 and share & (share - 1) == 0:
            assert division.most == 1
        assert sorted(index for held in division.parts for part in held for index in range(*part)) == list(range(count))


def test_nodes_at_the_end_of_the_tree_may_be_incomplete() -> None:
    assert subtrees(4, 6, 6) == [(4, 6)]
    assert subtrees(0, 6, 6) == [(0, 6)]
    assert subtrees(1, 6, 6) == [(1, 2), (2, 4), (4, 6)]
    assert subtrees(4, 6, 8) == [(4, 6)]
    assert subtrees(2, 7, 8) == [(2, 4), (4, 6), (6, 7)]
    assert subtrees(3, 3, 8) == []


@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_a_missing_gradient_counts_as_zeros(ranks: int) -> None:
    zeros = [torch.tensor([-0.0, 1.0]) if index == 1 else None for index in range(4)]
    parts = []
    division = divide(4, ranks)
    for rank in range(ranks):
        local = LocalSums(4)
        for index in range(*share_of_rank(4, rank, ranks)):
            found = zeros[index]
            local.add((index, index + 1), {} if found is None else {"w": found.clone()})
        parts += [each.get("w", torch.zeros(2)) for each in local.sums]
    out = torch.empty(2)
    division.order.sum_into(out, parts, torch.empty(division.order.depth, BLOCK))
    assert out.tolist() == [0.0, 1.0]


def test_half_precision_gradients_are_added_in_float32() -> None:
    local = LocalSums(2)
    values = torch.tensor([1.0, 2.0**-9]).bfloat16()
    local.add((0, 1), {"w": values[:1].clone()})
    local.add((1, 2), {"w": values[1:].clone()})
    (total,) = local.sums
    assert total["w"].dtype is torch.float32 and total["w"].item() == 1.0 + 2.0**-9
