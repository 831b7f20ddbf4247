"""The probe of the machine at hand."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from hpctrain.estimate import machine_probe
from hpctrain.estimate.machine_probe import best_time, probe


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIDE": 64, "STREAM": 2**14, "FILE": 2**20, "LONGEST": 0.02}.items():
        monkeypatch.setattr(machine_probe, name, value)
    monkeypatch.setattr(machine_probe, "cpu_affinity", lambda: (0, 1))


def load(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (value, value, value))


def test_rates_are_measured_and_threads_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, 0.0)
    before = torch.get_num_threads()
    found = probe(folder=tmp_path / "not" / "there")
    assert torch.get_num_threads() == before and found.kind == "cpu" and found.cores == 2
    for curve in (found.flops, found.bandwidth):
        assert sorted(curve) == [1, 2] and 0 < curve[1] <= curve[2] <= 2 * curve[1]
    assert 1e-8 < found.call < 1e-2 and found.disk > 0 and not list(tmp_path.iterdir())
    assert any(str(tmp_path) in line for line in found.assumed)


def test_a_busy_machine_is_taken_to_do_with_two_cores_twice_what_it_does_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch, 3.0)
    found = probe(folder=tmp_path)
    assert found.flops[2] == 2 * found.flops[1] and found.bandwidth[2] == 2 * found.bandwidth[1]
    assert any("others are at work here" in line for line in found.assumed)


def test_one_thread_is_timed_by_its_own_clock() -> None:
    asleep = best_time(lambda: time.sleep(0.01), 1, bursts=2)
    assert asleep < 0.005 <= best_time(lambda: time.sleep(0.01), 2, bursts=2)


def test_a_folder_that_cannot_be_written_leaves_an_assumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    found = probe(folder=tmp_path)
    assert found.disk == 1e9 and any("1 GB/s" in line and "Permission denied" in line for line in found.assumed)
