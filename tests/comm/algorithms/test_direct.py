"""Direct reductions by all-to-all exchange, over any transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from suites.algorithms import AllReduceSuite, ReduceScatterSuite

from hpctrain.comm.algorithms.base import slices
from hpctrain.comm.algorithms.direct import all_reduce, reduce_scatter
from hpctrain.comm.reduction import Reducer


def test_slices_cover_the_tensor_in_nearly_equal_lengths() -> None:
    assert slices(10, 4) == [3, 3, 2, 2] and slices(2, 3) == [1, 1, 0] and slices(0, 2) == [0, 0]
    for numel in range(40):
        for size in range(1, 7):
            parts = slices(numel, size)
            assert sum(parts) == numel and max(parts) - min(parts) <= 1 and parts == sorted(parts, reverse=True)


class TestReduceScatter(ReduceScatterSuite):
    algorithm = reduce_scatter


class TestAllReduce(AllReduceSuite):
    algorithm = all_reduce


@pytest.mark.ranks
def test_bytes_equal_those_of_two_exchanges(comm: Any) -> None:
    numel = 120 * comm.size
    with comm.transport.recording() as recorder:
        all_reduce(comm.transport, Reducer(), torch.zeros(numel, dtype=torch.bfloat16), "sum")
    assert recorder.calls == {"all_to_all": 2} and recorder.bytes == {"all_to_all": 2 * 2 * numel}
