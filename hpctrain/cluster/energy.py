"""Energy counters of a node: Cray's pm_counters, or RAPL of processors and memory; and of a GPU, by NVML or amdsmi.

A counter belongs to the device, not to a job: it includes what other jobs use at the same time. A RAPL
counter starts again from zero after some minutes at full power, so a thread reads it more often than that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYS = Path("/sys")
EVERY = 20.0  # seconds between two reads of counters that start again from zero
MICRO, MILLI = 1e-6, 1e-3


@dataclass(frozen=True)
class Counter:
    """Energy counter of a device: ``read`` returns joules, which start again from zero after ``wraps`` joules."""

    source: str  # pm_counters, rapl, nvml or amdsmi
    device: str
    read: Callable[[], float]
    wraps: float | None = None


@dataclass(frozen=True)
class Energy:
    """Energy that a device has used."""

    source: str
    device: str
    joules: float


class EnergyMeter:
    """Energy that some counters have counted since this object was made."""

    def __init__(self, counters: Sequence[Counter], every: float = EVERY) -> None:
        self._counters = list(counters)
        self._last = [counter.read() for counter in self._counters]
        self._sums = [0.0] * len(self._counters)
        self._failed: set[int] = set()
        self._lock, self._end = threading.Lock(), threading.Event()
        if any(counter.wraps for counter in self._counters):
            threading.Thread(target=self._watch, args=(every,), name="energy", daemon=True).start()

    def read(self) -> list[Energy]:
        """Return the energy of each counter that could be read at all times."""
        with self._lock:
            self._update()
            known = [index for index in range(len(self._counters)) if index not in self._failed]
            return [Energy(self._counters[at].source, self._counters[at].device, self._sums[at]) for at in known]

    def close(self) -> None:
        self._end.set()

    def _watch(self, every: float) -> None:
        while not self._end.wait(every):
            with self._lock:
                self._update()

    def _update(self) -> None:
        for index, counter in enumerate(self._counters):
            try:
                now = counter.read()
            except (OSError, ValueError, RuntimeError):
                self._failed.add(index)
                continue
            used = now - self._last[index]
            if used < 0 and counter.wraps:
                used += counter.wraps
            if used < 0:
                self._failed.add(index)  # reset, for instance by a driver: its energy is unknown
            self._sums[index] += used
            self._last[index] = now


# Counters of a node ---------------------------------------------------------------------------------------------------


def node_counters(sys: Path = SYS) -> list[Counter]:
    """Return the counters of this node that can be read: of the whole node if it has one, else RAPL's."""
    whole = sys / "cray/pm_counters/energy"
    if found := _readable([Counter("pm_counters", "node", lambda: _joules(whole))]):
        return found
    domains = sorted((sys / "class/powercap").glob("intel-rapl:*"))
    return _readable([counter for folder in domains for counter in _rapl(folder)])


def _readable(counters: Sequence[Counter]) -> list[Counter]:
    """Return the counters that can be read; often only the administrator may read RAPL."""
    found = []
    for counter in counters:
        with suppress(OSError, ValueError):
            counter.read()
            found.append(counter)
    return found


def _joules(path: Path) -> float:
    """Return the joules in a file of the form ``123456 J 1650000000 us``."""
    words = path.read_text().split()
    if len(words) < 2 or words[1] != "J":
        raise ValueError(f"{path} does not hold joules")
    return float(words[0])


def _rapl(folder: Path) -> list[Counter]:
    """Return the counter of a RAPL domain: a processor package, or its memory; cores are a part of the package."""
    try:
        name = (folder / "name").read_text().strip()
        wraps = float((folder / "max_energy_range_uj").read_text()) * MICRO
    except (OSError, ValueError):
        return []
    if not (name.startswith("package") or name == "dram"):
        return []
    path = folder / "energy_uj"
    return [Counter("rapl", f"{folder.name} {name}", lambda: float(path.read_text()) * MICRO, wraps)]


# Counters of a GPU ----------------------------------------------------------------------------------------------------


def gpu_counters(uuid: str, *, amd: bool = False) -> list[Counter]:
    """Return the counter of a GPU, by its UUID; none if its library is missing or it has no counter."""
    try:
        return [_amd(uuid) if amd else _nvidia(uuid)]
    except Exception:  # each library has its own classes of errors
        return []


def _nvidia(uuid: str) -> Counter:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    read = _guarded(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * MILLI)
    read()
    return Counter("nvml", uuid, read)


def _amd(uuid: str) -> Counter:
    import amdsmi

    amdsmi.amdsmi_init()
    handles = amdsmi.amdsmi_get_processor_handles()
    wanted = uuid.replace("-", "").lower()
    (handle,) = (one for one in handles if wanted in amdsmi.amdsmi_get_gpu_device_uuid(one).replace("-", "").lower())

    def joules() -> float:
        found: dict[str, Any] = amdsmi.amdsmi_get_energy_count(handle)
        count = found.get("energy_accumulator", found.get("power"))
        if count is None:
            raise ValueError("amdsmi reports no energy")
        return float(count) * float(found["counter_resolution"]) * MICRO

    read = _guarded(joules)
    read()
    return Counter("amdsmi", uuid, read)


def _guarded(read: Callable[[], float]) -> Callable[[], float]:
    """Return the function with errors of a library as ``OSError``."""

    def guarded() -> float:
        try:
            return read()
        except Exception as error:
            raise OSError(str(error)) from error

    return guarded
