"""Reductions in the order of the microbatches: in node memory, by messages, in slices and whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tree_sums import tree_sum, wild_numbers
from torch import Tensor

from hpctrain.parallel.reproducible.tree import LocalSums, share_of_rank
from hpctrain.parallel.reproducible.tree_reduce import ReducedBlock, TreeReduce

NUMELS = (48, 4800, 96)  # multiples of 1, 2, 3 and 4 ranks


def blocks_of(comm: Any, count: int, seed: int, results: list[Tensor]) -> tuple[list[ReducedBlock], list[Tensor]]:
    """Return the blocks of a step, and the expected sums."""
    blocks, expected = [], []
    for number, numel in enumerate(NUMELS):
        leaves = [each * (1 + number + seed) for each in wild_numbers(count, numel)]
        expected.append(tree_sum(leaves))
        local = LocalSums(count)
        for index in range(*share_of_rank(count, comm.rank, comm.size)):
            local.add((index, index + 1), {"w": leaves[index].clone()})

        def write(index: int, memory: Tensor, local: LocalSums = local) -> None:
            memory.copy_(local.sums[index]["w"])

        blocks.append(ReducedBlock(numel, torch.float32, write, lambda memory: results.append(memory.clone())))
    return blocks, expected


@pytest.mark.ranks
@pytest.mark.parametrize("shared", (True, False))
@pytest.mark.parametrize("count", (2, 4, 5, 8, 12))
def test_every_rank_gets_the_sum_of_the_tree(comm: Any, count: int, shared: bool) -> None:
    reduction = TreeReduce(comm, count)
    if not shared:
        reduction.shares_memory = False
    for step in range(3):  # memory is used again
        results: list[Tensor] = []
        blocks, expected = blocks_of(comm, count, step, results)
        reduction.all_reduce(blocks, count)
        assert all(map(torch.equal, results, expected)) and len(results) == len(expected)
        results.clear()
        reduction.reduce_scatter(blocks, count)
        slices = [each.chunk(comm.size)[comm.rank] for each in expected]
        assert all(map(torch.equal, results, slices)) and len(results) == len(expected)


@pytest.mark.ranks
def test_a_small_last_batch_has_fewer_microbatches_than_ranks(comm: Any) -> None:
    reduction = TreeReduce(comm, 8)
    results: list[Tensor] = []
    blocks, expected = blocks_of(comm, 1, 0, results)
    reduction.all_reduce(blocks, 1)
    assert all(map(torch.equal, results, expected))


@pytest.mark.ranks
def test_in_node_memory_nothing_is_sent(comm: Any) -> None:
    reduction = TreeReduce(comm, 8)
    if not reduction.shares_memory:
        assert comm.nodes > 1
        return
    results: list[Tensor] = []
    blocks, _ = blocks_of(comm, 8, 0, results)
    reduction.all_reduce(blocks, 8)
    with comm.recording() as recorder:
        reduction.all_reduce(blocks, 8)
    assert recorder.bytes["send"] == 0
