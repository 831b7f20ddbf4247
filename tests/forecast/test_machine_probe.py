"""Probe of the rates of this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from hpctrain.forecast import machine_probe
from hpctrain.forecast.machine_probe import best_time, probe


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIDE": 64, "STREAM": 2**14, "FILE": 2**20, "LONGEST": 0.02}.items():
        monkeypatch.setattr(machine_probe, name, value)
    monkeypatch.setattr(machine_probe, "cpu_affinity", lambda: (0, 1))


def load(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """Simulate other processes that use this fraction of the cores during the probe."""
    looks = iter([[1000, 5000], [1000 + round(400 * (1 - value)), 5400]])
    monkeypatch.setattr(machine_probe, "_ticks", lambda: next(looks))
    monkeypatch.setattr(machine_probe, "LOOK", 0)


def test_rates_are_measured_and_the_thread_count_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, 0.1)
    before = torch.get_num_threads()
    found = probe(folder=tmp_path / "not" / "there")
    assert torch.get_num_threads() == before and found.kind == "cpu" and found.cores == 2
    for curve in (found.flops, found.bandwidth):
        assert sorted(curve) == [1, 2] and 0 < curve[1] <= curve[2] <= 2 * curve[1]
    assert 1e-8 < found.op_overhead < 1e-2 and found.disk > 0 and not list(tmp_path.iterdir())
    assert any(str(tmp_path) in line for line in found.assumed) and not found.busy
    assert found.load_of_others == pytest.approx(0.1) and found.slowest >= 1
    told = "others kept 10% of the cores at work just before; load average"
    assert any(line.startswith(told) for line in found.assumed)


def test_on_a_busy_machine_rates_are_scaled_from_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, 0.5)
    found = probe(folder=tmp_path)
    assert found.flops[2] == 2 * found.flops[1] and found.bandwidth[2] == 2 * found.bandwidth[1]
    assert any("other processes are running" in line for line in found.assumed) and found.busy


def test_the_load_of_other_processes_is_read_from_proc_stat_or_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = "cpu0 10 0 10 70 5 0 0 5 0 0\ncpu1 20 0 0 60 0 0 0 0 0 0\n"
    cores = f"cpu  9 9 9 9 9 9 9 9 0 0\n{mine}cpu2 9 9 9 9 9 9 9 9 9 9\n"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path: cores)
        assert machine_probe._ticks() == [70 + 5 + 60, 100 + 80]
    load(monkeypatch, 0.25)
    assert machine_probe.load_of_others() == pytest.approx(0.25)
    monkeypatch.setattr(machine_probe, "_ticks", list)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert machine_probe.load_of_others() == pytest.approx(0.75)


def test_one_thread_is_timed_by_its_cpu_clock() -> None:
    asleep = best_time(lambda: time.sleep(0.01), 1, bursts=2)
    assert asleep < 0.005 <= best_time(lambda: time.sleep(0.01), 2, bursts=2)


def test_an_unwritable_folder_leaves_an_assumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    found = probe(folder=tmp_path)
    assert found.disk == 1e9 and any("1 GB/s" in line and "Permission denied" in line for line in found.assumed)
