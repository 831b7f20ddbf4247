"""Measurement of all_reduce, and the error for a wrong sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.doctoring import only, told
from support.pace import scaled

from hpctrain.doctor.preflight.messages import SIZES, ReductionCheck, check_reductions, measure_reductions

CPU = torch.device("cpu")


def test_bus_bandwidth_follows_the_ring_formula() -> None:
    assert ReductionCheck(1000, 0.5, (), 4).bus == 2 * 3 / 4 * 1000 / 0.5


def test_wrong_sums_and_times_are_findings() -> None:
    right, wrong = ReductionCheck(2**20, 2e-3, (), 4), ReductionCheck(2**12, 1e-5, (1, 3), 4)
    assert told(check_reductions([wrong, right])) == [("error", "all_reduce")]
    assert only(check_reductions([wrong])).found == "a wrong sum on 2 ranks, 1 the first"
    assert [finding.found for finding in check_reductions([right])] == ["correct on all ranks; 1 MiB in 2 ms"]
    assert list(check_reductions([])) == []


@pytest.mark.ranks
def test_sizes_are_measured_as_time_allows(own: Any) -> None:
    found = measure_reductions(own, CPU, 2.0)
    assert [one.nbytes for one in found] == list(SIZES[: len(found)]) and len(found) >= 2
    assert all(one.wrong == () and one.size == own.size and 0 < one.seconds < scaled(1) for one in found)
    # Two small sizes are always measured; they predict that the large one would take too long.
    assert [one.nbytes for one in measure_reductions(own, CPU, 1e-9)] == [*SIZES[:2]]


class Faulty:
    """A communicator whose last rank gets a wrong sum."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def split(self, colour: int) -> Faulty:
        return Faulty(self._comm.split(colour))

    def all_reduce(self, tensor: Any) -> None:
        self._comm.all_reduce(tensor)
        if self._comm.rank == self._comm.size - 1:
            tensor[3] += 1


@pytest.mark.ranks
def test_a_wrong_sum_is_detected(own: Any) -> None:
    found = measure_reductions(Faulty(own), CPU, 1e-9)  # type: ignore[arg-type]
    assert [one.wrong for one in found] == [(own.size - 1,)] * 2
