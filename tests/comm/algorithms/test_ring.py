"""Ring algorithms."""

from __future__ import annotations

import pytest
import torch
from suites.algorithms import AllGatherSuite, AllReduceSuite, BroadcastSuite, ReduceScatterSuite, exact, wanted
from support.reductions import same_bits
from support.threads import ThreadTransport, ThreadWorld

from hpctrain.comm.algorithms import ring
from hpctrain.comm.algorithms.base import slices
from hpctrain.comm.reduction import Reducer


class TestBroadcast(BroadcastSuite):
    algorithm = ring.broadcast


class TestReduceScatter(ReduceScatterSuite):
    algorithm = ring.reduce_scatter


class TestAllGather(AllGatherSuite):
    algorithm = ring.all_gather


class TestAllReduce(AllReduceSuite):
    algorithm = ring.all_reduce


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("segment, longest", [(4, 31), (60, 67)])  # bytes, elements
def test_segmentation_does_not_change_the_result(size: int, segment: int, longest: int) -> None:
    def body(transport: ThreadTransport) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            for numel in (0, 1, longest):
                tensor = exact(transport.rank, numel, dtype, "sum")
                ring.all_reduce(transport, Reducer(), tensor, "sum", segment)
                assert same_bits(tensor, wanted(size, numel, dtype, "sum"))
                tensor = exact(transport.rank, numel, dtype, "sum")
                ring.broadcast(transport, tensor, size - 1, segment)
                assert same_bits(tensor, exact(size - 1, numel, dtype, "sum"))

    ThreadWorld(size).run(body)


def test_slices_are_added_starting_at_the_next_rank() -> None:
    # 1e8 absorbs a 1 in float32, which shows the order: slice c starts at rank c + 1 and ends at rank c.
    brought = [1e8, 1.0, -1e8]

    def body(transport: ThreadTransport) -> list[float]:
        tensor = torch.full((3,), brought[transport.rank])
        ring.all_reduce(transport, Reducer(), tensor, "sum")
        return tensor.tolist()

    slice_0, slice_1, slice_2 = (1.0 - 1e8) + 1e8, (-1e8 + 1e8) + 1.0, (1e8 + 1.0) - 1e8
    assert ThreadWorld(3).run(body) == [[float(torch.tensor(1.0) - 1e8 + 1e8), slice_1, 0.0]] * 3
    assert (slice_0, slice_2) == (1.0, 1.0)  # float64 absorbs nothing


def test_partial_sums_are_sent_in_float32_and_results_in_16_bits() -> None:
    world = ThreadWorld(4)
    world.run(lambda transport: ring.all_reduce(transport, Reducer(), torch.ones(40, dtype=torch.bfloat16), "sum"))
    assert all(recorder.bytes["send"] == 30 * 4 + 30 * 2 for recorder in world.recorders)
    world = ThreadWorld(4)
    world.run(lambda transport: ring.all_reduce(transport, Reducer(), torch.ones(40, dtype=torch.bfloat16), "max"))
    assert all(recorder.bytes["send"] == 60 * 2 for recorder in world.recorders)


def test_the_result_may_be_a_slice_of_the_input() -> None:
    def body(transport: ThreadTransport) -> None:
        tensor = exact(transport.rank, 31, torch.float16, "sum")
        out = torch.split(tensor, slices(31, 5))[transport.rank]
        ring.reduce_scatter(transport, Reducer(), out, tensor, "sum")
        assert same_bits(out, torch.split(wanted(5, 31, torch.float16, "sum"), slices(31, 5))[transport.rank])

    ThreadWorld(5).run(body)
