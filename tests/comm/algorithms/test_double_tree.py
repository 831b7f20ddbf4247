"""Algorithms on two complementary trees."""

from __future__ import annotations

import pytest
import torch
from suites.algorithms import AllReduceSuite, BroadcastSuite, ReduceSuite, exact, wanted
from support.reductions import same_bits
from support.threads import ThreadTransport, ThreadWorld

from hpctrain.comm.algorithms import double_tree
from hpctrain.comm.algorithms.cost import tree_height
from hpctrain.comm.algorithms.double_tree import children_of, neighbours, parent_of
from hpctrain.comm.reduction import Reducer


class TestBroadcast(BroadcastSuite):
    algorithm = double_tree.broadcast


class TestReduce(ReduceSuite):
    algorithm = double_tree.reduce


class TestAllReduce(AllReduceSuite):
    algorithm = double_tree.all_reduce


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("segment, longest", [(4, 31), (60, 67)])  # bytes, elements
def test_segmentation_does_not_change_the_result(size: int, segment: int, longest: int) -> None:
    def body(transport: ThreadTransport) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            for numel in (0, 1, longest):
                tensor = exact(transport.rank, numel, dtype, "sum")
                double_tree.all_reduce(transport, Reducer(), tensor, "sum", segment)
                assert same_bits(tensor, wanted(size, numel, dtype, "sum"))

    ThreadWorld(size).run(body)


@pytest.mark.parametrize("size", range(1, 70))
def test_each_rank_is_in_both_trees_and_has_children_in_one_at_most(size: int) -> None:
    inner = []
    for tree in (0, 1):
        parents = {child: rank for rank in range(size) for child in neighbours(rank, size, tree)[1]}
        assert parents == {rank: neighbours(rank, size, tree)[0] for rank in range(1, size)}
        assert max((_depth(rank, parents) for rank in range(size))) == (tree_height(size) + 1 if size > 1 else 0)
        inner.append({rank for rank in range(1, size) if neighbours(rank, size, tree)[1]})
        assert all(len(neighbours(rank, size, tree)[1]) <= 2 for rank in range(size))
    assert not inner[0] & inner[1]


@pytest.mark.parametrize("count", range(1, 70))
def test_tree_is_in_order(count: int) -> None:
    def below(role: int) -> list[int]:
        lower = [child for child in children_of(role, count) if child < role]
        higher = [child for child in children_of(role, count) if child > role]
        return [*(below(lower[0]) if lower else []), role, *(below(higher[0]) if higher else [])]

    top = next(role for role in range(1, count + 1) if not parent_of(role, count))
    assert below(top) == list(range(1, count + 1))


def _depth(rank: int, parents: dict[int, int]) -> int:
    return 1 + _depth(parents[rank], parents) if rank in parents else 0
