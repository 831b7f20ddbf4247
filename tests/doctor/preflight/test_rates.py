"""Rates of computation and memory access of every rank, and detection of slow ranks."""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.doctoring import only, rank_placement, told

from hpctrain.doctor.preflight.rates import (
    FLUSH,
    MOST,
    Written,
    check_writes,
    measure_rate,
    measure_writes,
    product,
    share_of,
    slow,
    stream,
    write,
)
from hpctrain.errors import UsageError
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


# Measurement of file writes: it removes its files and reports ranks that cannot write or see another folder -----------


SEATS = [rank_placement(0, 0, 0), rank_placement(1, 0, 1), rank_placement(2, 1, 0)]
FINE = Written(2**24, 0.5)


def test_writing_respects_its_limits(tmp_path: Path) -> None:
    found = write(tmp_path / "x", 60.0, most=FLUSH)
    assert found.nbytes == FLUSH and found.rate == pytest.approx(FLUSH / found.seconds) and not found.trouble
    assert write(tmp_path / "x", 0.0).nbytes == FLUSH
    assert list(tmp_path.iterdir()) == []


def test_failed_writes_are_reported_and_removed(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        found = write(tmp_path / "x", 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found == Written(trouble="File too large") and list(tmp_path.iterdir()) == []


def test_write_failures_and_rates_are_findings() -> None:
    folder = Path("/scratch")
    assert [finding.found for finding in check_writes([FINE] * 3, SEATS, folder)] == [
        "3 ranks wrote 101 MB/s together into /scratch, flushed"
    ]
    found = only(check_writes([FINE, Written(trouble="Disk quota exceeded"), FINE], SEATS, folder))
    assert found.level == "error" and "rank 1 on n1 cannot write into /scratch: Disk quota exceeded" in found.found
    found = only(check_writes([FINE, FINE, Written(seen=False)], SEATS, folder))
    assert found.level == "error" and found.found.startswith("n2 do not see what n1 has made in /scratch")


@pytest.mark.ranks
def test_all_ranks_write(comm: Any, shared_tmp_path: Path) -> None:
    found = measure_writes(comm, shared_tmp_path, 0.1)
    comm.barrier()
    assert [one.nbytes >= FLUSH and one.seen for one in found] == [True] * comm.size
    assert list(shared_tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_a_folder_that_is_not_shared_is_detected(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same name is another folder on every rank, as on nodes with separate /tmp."""
    here = Path("/proc/self/cwd")
    monkeypatch.chdir(tmp_path)
    found = measure_writes(comm, here, 0.1)
    assert [one.seen for one in found] == [rank == 0 for rank in range(comm.size)]
    assert told(check_writes(found, [rank_placement(rank, rank, 0) for rank in range(comm.size)], here)) == [
        ("error", "files")
    ]


@pytest.mark.ranks(1, 2)
def test_a_missing_folder_is_a_user_error(comm: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write into .*lost: No such file or directory: give another --folder"):
        measure_writes(comm, tmp_path / "lost", 0.1)


def test_a_small_filesystem_is_not_filled() -> None:
    assert share_of(1000 * 4096, 4) == 1000 * 4096 // (8 * 4) and share_of(2**50, 4) == MOST
