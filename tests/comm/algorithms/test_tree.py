"""Binomial tree algorithms."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from suites.algorithms import AllReduceSuite, BroadcastSuite, Play, ReduceSuite, Suite, moved
from support.reductions import same_bits, values

from hpctrain.comm.algorithms import tree
from hpctrain.comm.transport.base import Transport


class TestBroadcast(BroadcastSuite):
    algorithm = tree.broadcast


class TestReduce(ReduceSuite):
    algorithm = tree.reduce


class TestAllReduce(AllReduceSuite):
    algorithm = tree.all_reduce


class TestGatherAndScatter(Suite):
    def test_gather_concatenates_in_rank_order(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            for root, dtype, share in product(range(transport.size), moved(transport), (0, 1, 13)):
                out = torch.zeros(share * transport.size, dtype=dtype) if transport.rank == root else None
                tree.gather(transport, out, values(transport.rank, share, dtype), root)
                everything = torch.cat([values(rank, share, dtype) for rank in range(transport.size)])
                assert out is None or same_bits(out, everything)

        play(body)

    def test_scatter_gives_each_rank_its_share(self, play: Play) -> None:
        def body(transport: Transport) -> None:
            for root, dtype, share in product(range(transport.size), moved(transport), (0, 1, 13)):
                whole = values(root, share * transport.size, dtype)
                out = torch.zeros(share, dtype=dtype)
                tree.scatter(transport, out, whole if transport.rank == root else None, root)
                assert same_bits(out, whole[transport.rank * share :][:share])
                assert same_bits(whole, values(root, share * transport.size, dtype))

        play(body)


@pytest.mark.parametrize("size", range(1, 40))
def test_every_rank_has_one_parent_and_the_tree_has_minimal_depth(size: int) -> None:
    parents = {child: rank for rank in range(size) for child in tree.children(rank, size)}
    assert parents == {rank: tree.parent(rank) for rank in range(1, size)}
    assert sum(len(tree.children(rank, size)) for rank in range(size)) == size - 1

    def depth(rank: int) -> Any:
        return 0 if rank == 0 else 1 + depth(tree.parent(rank))

    assert max(map(depth, range(size))) <= (size - 1).bit_length()


@pytest.mark.parametrize("size", range(1, 40))
def test_a_subtree_contains_a_rank_and_the_subtrees_of_its_children(size: int) -> None:
    for rank in range(size):
        assert tree.subtree(rank, size) == 1 + sum(tree.subtree(child, size) for child in tree.children(rank, size))
