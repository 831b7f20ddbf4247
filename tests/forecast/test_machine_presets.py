"""Rates of one rank on a machine, and machines by name."""

from __future__ import annotations

import pytest
from support.forecasts import CPU, GPU

from hpctrain.errors import UsageError
from hpctrain.forecast.machine import DEVICES, PRODUCTS, LinkModel, preset, rate, threads_of


def test_ranks_divide_the_cores_of_a_node() -> None:
    alone, two, four, eight = (CPU.rank_share(ranks) for ranks in (1, 2, 4, 8))
    assert [rank_share.threads for rank_share in (alone, two, four, eight)] == [4, 2, 1, 1]
    assert (alone.flops, alone.bandwidth) == (3e10, 2e9)  # the rates of all cores together
    assert (two.flops, four.flops, four.bandwidth) == (1.5e10, 7.5e9, 5e8)
    assert (eight.flops, eight.bandwidth, eight.oversubscription) == (3.75e9, 2.5e8, 2.0)
    assert (four.sync, eight.sync, four.oversubscription) == (1e-5, 1e-3, 1.0)


def test_ranks_do_not_share_gpus() -> None:
    assert GPU.rank_share(1) == GPU.rank_share(8) and GPU.rank_share(8).flops == 1e12


def test_rates_are_interpolated_linearly_and_constant_beyond() -> None:
    curve = {2: 10.0, 4: 14.0}
    assert [rate(curve, threads) for threads in (1, 2, 3, 4, 9)] == [5, 10, 12, 14, 14]


def test_thread_counts_equal_those_of_a_run() -> None:
    assert [threads_of(6, ranks) for ranks in (1, 2, 4, 6, 7)] == [6, 3, 1, 1, 1]
    with pytest.raises(UsageError, match="0 ranks on 2 cores"):
        threads_of(2, 0)


def test_link_time_is_latency_plus_bytes_over_bandwidth() -> None:
    assert LinkModel(1e-3, 1e6).seconds(2000) == pytest.approx(3e-3)


@pytest.mark.parametrize("name", DEVICES)
def test_a_known_machine_has_an_assumed_fraction_of_its_peak(name: str) -> None:
    found = preset(name.lower(), "bfloat16")
    assert found.name == name and found.peak == DEVICES[name].bfloat16 and found.flops[1] == found.peak * PRODUCTS
    assert any(f"{PRODUCTS:.0%}" in line for line in found.assumed)
    assert preset(name).peak == DEVICES[name].float32 < found.peak


def test_an_unknown_machine_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match="unknown machine 'H10': did you mean .*known are A100, H100, H200, MI250X"):
        preset("H10")
