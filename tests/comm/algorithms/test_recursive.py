"""Recursive doubling and recursive halving."""

from __future__ import annotations

import pytest
import torch
from suites.algorithms import AllGatherSuite, AllReduceSuite, ReduceScatterSuite
from support.threads import ThreadTransport, ThreadWorld

from hpctrain.comm.algorithms import recursive
from hpctrain.comm.reduction import Reducer


class TestReduceScatter(ReduceScatterSuite):
    algorithm = recursive.reduce_scatter


class TestAllGather(AllGatherSuite):
    algorithm = recursive.all_gather


class TestDoubling(AllReduceSuite):
    algorithm = recursive.double_all_reduce


class TestHalving(AllReduceSuite):
    algorithm = recursive.halve_all_reduce


def test_halvings_end_at_one_slice() -> None:
    assert recursive.halvings(1) == [] and recursive.halvings(2) == [(1, 2)]
    assert recursive.halvings(5) == [(3, 5), (2, 3), (1, 2)] and recursive.halvings(8) == [(4, 8), (2, 4), (1, 2)]


@pytest.mark.parametrize(
    "size, numel, messages", [(4, 100, 2), (4, 10**6, 4), (2, 10**6, 1), (8, 100, 3), (8, 10**6, 6)]
)
def test_short_tensors_use_doubling_and_long_ones_halving(size: int, numel: int, messages: int) -> None:
    def body(transport: ThreadTransport) -> None:
        tensor = torch.full((numel,), transport.rank + 1, dtype=torch.int32)
        recursive.all_reduce(transport, Reducer(), tensor, "sum")
        assert tensor.eq(size * (size + 1) // 2).all()

    world = ThreadWorld(size)
    world.run(body)
    assert [recorder.calls["send"] for recorder in world.recorders] == [messages] * size


def test_doubling_adds_neighbours_first() -> None:
    # 1e8 absorbs a 1 in float32: (r0 + r1) + (r2 + r3) is 0; in rank order it would be 1.
    brought = torch.tensor([1e8, 1.0, -1e8, 1.0])

    def body(transport: ThreadTransport) -> float:
        tensor = brought[transport.rank].view(1).clone()
        recursive.double_all_reduce(transport, Reducer(), tensor, "sum")
        return tensor.item()

    assert ThreadWorld(4).run(body) == [float((brought[0] + brought[1]) + (brought[2] + brought[3]))] * 4 == [0.0] * 4
