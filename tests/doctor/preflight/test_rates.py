"""Rates of computation and memory access of every rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hpctrain.doctor.preflight.rates import RateKernel, measure, product, stream

CPU = torch.device("cpu")


def test_a_known_rate_is_measured(comm: Any) -> None:
    calls: list[float] = []

    def run() -> None:
        calls.append(time.perf_counter())
        time.sleep(0.01)

    (rate,) = measure(comm, RateKernel(run, 500.0), 0.4)
    assert 0.5 * 50_000 < rate <= 50_000
    assert calls[-1] - calls[0] < 2


def test_a_kernel_runs_at_least_once(comm: Any) -> None:
    assert measure(comm, RateKernel(lambda: time.sleep(0.02), 1.0), 1e-6)[0] < 50


@pytest.mark.parametrize("make, amount", [(product, 2 * 768**3), (stream, 3 * 2**25)])
def test_kernels_report_the_work_that_they_do(make: Any, amount: float) -> None:
    kernel = make(CPU)
    kernel.run()
    assert kernel.amount == amount


@pytest.mark.ranks
def test_a_slow_rank_has_the_lowest_rate(comm: Any) -> None:
    pause = 0.02 if comm.rank == comm.size - 1 else 0.002
    rates = measure(comm, RateKernel(lambda: time.sleep(pause), 1.0), 0.2)
    assert len(rates) == comm.size and min(rates[:-1]) > 2 * rates[-1]
