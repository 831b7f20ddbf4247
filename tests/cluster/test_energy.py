"""Energy counters, from a made-up /sys: which are read, overflow, counters that fail, libraries of GPUs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.cluster.energy import Counter, EnergyMeter, gpu_counters, node_counters

RANGE = 262_143_328_850  # microjoules, of a real processor


def domain(sys_root: Path, name: str, called: str, microjoules: int) -> Path:
    """Make a RAPL domain and return the file of its counter."""
    folder = sys_root / "class/powercap" / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(called + "\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


@pytest.fixture
def rapl(tmp_path: Path) -> dict[str, Path]:
    names = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
    }
    names |= {"intel-rapl:2": "psys", "intel-rapl-mmio:0": "package-0"}
    return {name: domain(tmp_path, name, called, 5_000_000) for name, called in names.items()}


def joules(meter: EnergyMeter) -> dict[str, float]:
    return {each.device: each.joules for each in meter.read()}


def test_packages_and_memory_count_but_not_their_parts(rapl: dict[str, Path], tmp_path: Path) -> None:
    meter = EnergyMeter(node_counters(tmp_path))
    assert joules(meter) == {"intel-rapl:0 package-0": 0.0, "intel-rapl:0:1 dram": 0.0, "intel-rapl:1 package-1": 0.0}
    for name in rapl:
        rapl[name].write_text("7500000\n")
    assert set(joules(meter).values()) == {2.5}
    meter.close()


def test_a_counter_that_starts_again_from_zero_loses_nothing(rapl: dict[str, Path], tmp_path: Path) -> None:
    meter = EnergyMeter(node_counters(tmp_path))
    path, expected = rapl["intel-rapl:0"], 0.0
    for microjoules in (200_000_000_000, 1_000_000, 262_000_000_000, 0):
        before = int(path.read_text())
        path.write_text(str(microjoules))
        expected += ((microjoules - before) % RANGE) / 1e6
        assert joules(meter)["intel-rapl:0 package-0"] == pytest.approx(expected)
    meter.close()


class Watched:
    """Counter that notes how often it was read, and starts again from zero after 100 joules."""

    def __init__(self) -> None:
        self.joules, self.reads = 90.0, 0

    def read(self) -> float:
        self.reads += 1
        return self.joules

    def wait_for_read(self) -> None:
        before, deadline = self.reads, time.monotonic() + 20
        while self.reads < before + 2:  # one that begins after the last change of the joules
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_a_thread_reads_counters_that_start_again() -> None:
    counter = Watched()
    meter = EnergyMeter([Counter("rapl", "package-0", counter.read, 100.0)], every=0.005)
    for value in (80.0, 70.0, 60.0):  # 90 joules each
        counter.joules = value
        counter.wait_for_read()
    assert joules(meter) == {"package-0": 270.0}
    meter.close()


def test_counters_that_do_not_start_again_need_no_thread() -> None:
    counter = Watched()
    meter = EnergyMeter([Counter("nvml", "GPU-0", counter.read)], every=0.001)
    time.sleep(0.05)
    assert counter.reads == 1
    counter.joules = 95.0
    assert joules(meter) == {"GPU-0": 5.0}
    counter.joules = 1.0  # the driver was loaded anew
    assert joules(meter) == {}


def test_a_counter_that_fails_is_unknown_from_then_on(rapl: dict[str, Path], tmp_path: Path) -> None:
    meter = EnergyMeter(node_counters(tmp_path))
    rapl["intel-rapl:0"].unlink()
    assert set(joules(meter)) == {"intel-rapl:0:1 dram", "intel-rapl:1 package-1"}
    rapl["intel-rapl:0"].write_text("9000000\n")
    assert set(joules(meter)) == {"intel-rapl:0:1 dram", "intel-rapl:1 package-1"}
    meter.close()


@pytest.mark.parametrize("content", ["", "not a number\n"])
def test_counters_that_cannot_be_read_do_not_exist(tmp_path: Path, content: str) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 1).write_text(content)
    assert node_counters(tmp_path) == [] and node_counters(tmp_path / "nothing") == []


def test_the_counter_of_the_whole_node_comes_first(rapl: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "cray/pm_counters/energy"
    path.parent.mkdir(parents=True)
    path.write_text("1000 J 1650000000 us\n")
    meter = EnergyMeter(node_counters(tmp_path))
    path.write_text("1250 J 1650009000 us\n")
    assert [(each.source, each.joules) for each in meter.read()] == [("pm_counters", 250.0)]
    path.write_text("300 W\n")
    assert meter.read() == []


# GPUs -----------------------------------------------------------------------------------------------------------------


def test_nvml_is_asked_for_the_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    millijoules = {"GPU-b": 5000}
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-b": "GPU-b"}[uuid],
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: millijoules[handle],
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    meter = EnergyMeter(gpu_counters("b"))
    millijoules["GPU-b"] = 7500
    assert [(each.source, each.device, each.joules) for each in meter.read()] == [("nvml", "b", 2.5)]
    assert gpu_counters("another") == []


def test_amdsmi_is_asked_for_the_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    count: dict[str, Any] = {"energy_accumulator": 1_000_000, "counter_resolution": 15.3}
    fake = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["a", "b"],
        amdsmi_get_gpu_device_uuid=lambda handle: {"a": "11ff-1", "b": "22FF-1"}[handle],
        amdsmi_get_energy_count=lambda handle: dict(count) if handle == "b" else {},
    )
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    meter = EnergyMeter(gpu_counters("22ff1", amd=True))
    count["energy_accumulator"] += 1_000_000
    assert [(each.source, each.joules) for each in meter.read()] == [("amdsmi", pytest.approx(15.3))]


@pytest.mark.parametrize("amd", [False, True])
def test_without_its_library_a_gpu_has_no_counter(monkeypatch: pytest.MonkeyPatch, amd: bool) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi" if amd else "pynvml", None)
    assert gpu_counters("a", amd=amd) == []
