"""Rates of computation and memory access of every rank, and detection of slow ranks."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.doctor.preflight.rates import measure_rate, product, slow, stream
from hpctrain.train.calibration import RateKernel

CPU = torch.device("cpu")


def test_a_known_rate_is_measured(comm: Any) -> None:
    calls: list[float] = []

    def run() -> None:
        calls.append(time.perf_counter())
        time.sleep(0.01)

    (rate,) = measure_rate(comm, RateKernel(run, 500.0), 0.4)
    assert 0.5 * 50_000 < rate <= 50_000
    assert calls[-1] - calls[0] < 2


def test_a_kernel_runs_at_least_once(comm: Any) -> None:
    assert measure_rate(comm, RateKernel(lambda: time.sleep(0.02), 1.0), 1e-6)[0] < 50


@pytest.mark.parametrize("make, amount", [(product, 2 * 768**3), (stream, 3 * 2**25)])
def test_kernels_report_the_work_that_they_do(make: Any, amount: float) -> None:
    kernel = make(CPU)
    kernel.run()
    assert kernel.amount == amount


@pytest.mark.ranks
def test_a_slow_rank_has_the_lowest_rate(comm: Any) -> None:
    pause = 0.02 if comm.rank == comm.size - 1 else 0.002
    rates = measure_rate(comm, RateKernel(lambda: time.sleep(pause), 1.0), 0.2)
    assert len(rates) == comm.size and min(rates[:-1]) > 2 * rates[-1]


@pytest.mark.parametrize(
    "rates, named",
    [
        ([], []),
        ([5.0], []),
        ([5.0, 10.0], [0]),
        ([9.0, 10.0], []),
        ([10.0, 10.0, 5.0], [2]),
        ([10.0, 9.5, 10.2, 5.0], [3]),
        ([10.0, 10.0, 5.0, 5.0], [2, 3]),  # half of all
        ([10.0, 5.0, 5.0, 5.0], []),  # 5.0 is the usual rate, and one member is faster
        ([0.0, 10.0, 10.0], [0]),
        ([1.0, 1.0, 1.0, 100.0], []),
    ],
)
def test_slow_members_are_found(rates: list[float], named: list[int]) -> None:
    assert sorted(slow(dict(enumerate(rates)))) == named


def test_the_fraction_of_the_usual_rate_is_returned() -> None:
    assert slow({"a": 4.0, "b": 10.0, "c": 10.0}) == {"a": 0.4}


@given(st.lists(st.floats(0.9, 1.1), max_size=200), st.floats(1e-3, 1e12))
def test_noise_of_ten_percent_is_not_an_outlier(noise: list[float], rate: float) -> None:
    assert slow({number: rate * factor for number, factor in enumerate(noise)}) == {}


@pytest.mark.parametrize("members", [2, 3, 4, 8, 64, 1000])
def test_half_the_rate_is_an_outlier_in_noise_of_five_percent(members: int) -> None:
    rng = random.Random(members)
    for _ in range(50):
        rates = {number: rng.uniform(0.95, 1.05) for number in range(members)}
        rates[1] *= 0.5
        assert list(slow(rates)) == [1]


def test_a_wide_spread_has_no_outlier() -> None:
    rng = random.Random(0)
    assert slow({number: rng.uniform(1, 10) for number in range(100)}) == {}
