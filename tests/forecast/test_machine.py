"""Rates of one rank on a machine, machines by name, and measurement of this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from support.forecasts import CPU, GPU

from hpctrain.cluster.resources import cpu_affinity
from hpctrain.errors import UsageError
from hpctrain.forecast.machine import (
    DEVICES,
    PRODUCTS,
    best_time,
    core_ticks,
    load_of_others,
    preset,
    probe,
    rate,
    threads_of,
)


def test_ranks_divide_the_cores_of_a_node() -> None:
    alone, two, four, eight = (CPU.rank_share(ranks) for ranks in (1, 2, 4, 8))
    assert [rank_share.threads for rank_share in (alone, two, four, eight)] == [4, 2, 1, 1]
    assert (alone.flops, alone.bandwidth) == (3e10, 2e9)  # the rates of all cores together
    assert (two.flops, four.flops, four.bandwidth) == (1.5e10, 7.5e9, 5e8)
    assert (eight.flops, eight.bandwidth, eight.oversubscription) == (3.75e9, 2.5e8, 2.0)
    assert (four.sync, eight.sync, four.oversubscription) == (1e-5, 1e-3, 1.0)
    assert GPU.rank_share(1) == GPU.rank_share(8) and GPU.rank_share(8).flops == 1e12  # each rank has a GPU


def test_rates_are_interpolated_linearly_and_constant_beyond() -> None:
    curve = {2: 10.0, 4: 14.0}
    assert [rate(curve, threads) for threads in (1, 2, 3, 4, 9)] == [5, 10, 12, 14, 14]


def test_thread_counts_equal_those_of_a_run() -> None:
    assert [threads_of(6, ranks) for ranks in (1, 2, 4, 6, 7)] == [6, 3, 1, 1, 1]
    with pytest.raises(UsageError, match="0 ranks on 2 cores"):
        threads_of(2, 0)


@pytest.mark.parametrize("name", DEVICES)
def test_a_known_machine_has_an_assumed_fraction_of_its_peak(name: str) -> None:
    found = preset(name.lower(), "bfloat16")
    assert found.name == name and found.peak == DEVICES[name].bfloat16 and found.flops[1] == found.peak * PRODUCTS
    assert any(f"{PRODUCTS:.0%}" in line for line in found.assumed)
    assert preset(name).peak == DEVICES[name].float32 < found.peak


def test_an_unknown_machine_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match="unknown machine 'H10': did you mean .*known are A100, H100, H200, MI250X"):
        preset("H10")


# Measurement of this machine ------------------------------------------------------------------------------------------


def test_rates_are_measured_and_the_thread_count_is_restored(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    found = probe(folder=tmp_path / "not" / "there", load=0.1)
    assert torch.get_num_threads() == before and found.kind == "cpu" and found.cores == len(cpu_affinity())
    for curve in (found.flops, found.bandwidth):
        assert 0 < curve[1] <= curve[found.cores] <= found.cores * curve[1]
    assert 1e-8 < found.op_overhead < 1e-2 and found.disk > 0 and not list(tmp_path.iterdir())
    assert any(str(tmp_path) in line for line in found.assumed) and not found.busy
    assert found.load_of_others == 0.1 and found.slowest >= 1
    told = "others kept 10% of the cores at work just before; load average"
    assert any(line.startswith(told) for line in found.assumed)


def test_a_busy_machine_is_scaled_from_one_core_and_an_unwritable_folder_is_assumed() -> None:
    found = probe(folder=Path("/proc"), load=0.5)
    for curve in (found.flops, found.bandwidth):
        assert curve[found.cores] == found.cores * curve[1]
    assert found.busy and any("other processes are running" in line for line in found.assumed) == (found.cores > 1)
    assert found.disk == 1e9 and any("1 GB/s (/proc: " in line for line in found.assumed)


def test_the_load_of_other_processes_is_read_from_proc_stat_or_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = cpu_affinity()
    mine = [f"cpu{first} 10 0 10 70 5 0 0 5 9 9", *(f"cpu{number} 20 0 0 60 0 0 0 0 0 0" for number in others)]
    (tmp_path / "stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 0 0", *mine, "cpu99999 9 9 9 9 9 9 9 9 9 9"]))
    assert core_ticks(tmp_path / "stat") == [70 + 5 + 60 * len(others), 100 + 80 * len(others)]
    assert core_ticks(tmp_path / "none") == []
    looks = iter([[1000, 5000], [1300, 5400]])
    assert load_of_others(lambda: next(looks), 0) == pytest.approx(0.25)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.75 * len(cpu_affinity()), 0.0, 0.0))
    assert load_of_others(list, 0) == pytest.approx(0.75)


def test_one_thread_is_timed_by_its_cpu_clock() -> None:
    asleep = best_time(lambda: time.sleep(0.01), 1, bursts=2)
    assert asleep < 0.005 <= best_time(lambda: time.sleep(0.01), 2, bursts=2)
