"""Balance of device and host: the share of updates on the device, by numbers worked out by hand, and its limits."""

from __future__ import annotations

import math

import pytest

from hpctrain.parallel.offload.autotune import last_groups, share_on_device

N = 10**9


def test_share_is_what_the_host_cannot_update_during_backward() -> None:
    # 28 bytes for each of 10^9 parameters at 200 GB/s: 0.14 s, of which backward hides 0.035 s.
    assert share_on_device(N, 0.035, 200e9) == pytest.approx(0.75)
    # The tokens below which offload costs time, at 400 TFLOP/s: 6 T / F seconds per parameter, here of the whole step.
    tokens = 28 / 200e9 * 400e12 / 6
    assert tokens == pytest.approx(9333, abs=1)
    for factor, share in ((0.5, 0.5), (1.0, 0.0), (2.0, 0.0)):
        seconds = 6 * factor * tokens / 400e12 * N
        assert share_on_device(N, seconds, 200e9) == pytest.approx(share, abs=1e-9)


def test_a_slow_link_counts_if_it_takes_longer_than_the_update() -> None:
    assert share_on_device(N, 0.1, 1e15, 10e9) == pytest.approx(0.5)  # 0.2 s for 2 GB
    assert share_on_device(N, 0.1, 1e15, 10e9, link_bytes=4) == pytest.approx(0.75)
    assert share_on_device(N, 0.1, 140e9, 1e12) == pytest.approx(0.5)
    assert share_on_device(N, 0.1, 140e9, 1e12, host_bytes=14) == 0


def test_share_is_limited_and_falls_with_the_available_time() -> None:
    shares = [share_on_device(N, seconds / 50, 200e9, 5e9) for seconds in range(30)]
    assert shares[0] == 1 and shares[-1] == 0 and shares == sorted(shares, reverse=True)
    by_size = [share_on_device(size * N, 0.5, 200e9) for size in range(1, 50)]
    assert by_size == sorted(by_size) and 0 <= by_size[0] <= by_size[-1] < 1
    by_rate = [share_on_device(N, 0.05, rate * 1e9) for rate in range(1, 400)]
    assert by_rate == sorted(by_rate, reverse=True)
    assert share_on_device(0, 1.0, 1e9) == 0 and share_on_device(N, -1.0, 1e9) == 1
    assert share_on_device(N, 1.0, 0.0) == 1 and share_on_device(N, math.inf, 1e9) == 0


@pytest.mark.parametrize(
    "share, count",
    [(0, 0), (0.1, 0), (0.16, 1), (0.5, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4), (1, 4)],
)
def test_share_is_rounded_to_whole_pieces_from_the_last(share: float, count: int) -> None:
    assert last_groups([10, 20, 40, 30], share) == [0, 1, 2, 3][4 - count :]


def test_without_pieces_none_stays_on_the_device() -> None:
    assert last_groups([], 1.0) == []
