"""Machines for ``hpctrain.train.init.join``: without a watchdog, and with GPUs and versions that do not exist."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hpctrain.train.init import Machine, join
from hpctrain.train.job import Job


def quiet_watchdog() -> Any:
    """Return the watchdog of a job in a test: the test runner limits the time, and handlers stay as they are."""
    return SimpleNamespace(step=None, failure_record=None, detector=None, close=lambda: None)


class FakeMachine(Machine):
    """Machine without a watchdog, whose GPUs have these identities; by default those of the real machine."""

    def __init__(self, gpus: tuple[str, ...] | None = None, versions: dict[str, str] | None = None) -> None:
        self._gpus, self._versions = gpus, versions

    def gpus(self) -> int:
        return super().gpus() if self._gpus is None else len(self._gpus)

    def identity(self, device: Any) -> str:
        return super().identity(device) if self._gpus is None or device.type == "cpu" else self._gpus[device.index]

    def use(self, device: Any) -> None:
        if self._gpus is None:
            super().use(device)

    def connect(self, world: Any, device: Any, verdict: Any) -> None:
        if self._gpus is None:
            super().connect(world, device, verdict)

    def versions(self) -> dict[str, str]:
        return self._versions or super().versions()

    def watch(self, transport: Any) -> Any:
        return quiet_watchdog()


def join_quietly(
    comm: Any = None,
    *,
    machine: FakeMachine | None = None,
    device: str = "auto",
    parallel: Any = None,
    offload: Any = None,
    asynchronous: Any = None,
    settings: Any = None,
    **options: Any,
) -> Job:
    """Join the ranks as ``hpctrain.init`` does, on a fake machine."""
    sections = parallel, offload, asynchronous, None
    return join(machine or FakeMachine(), comm, device, sections, settings or {}, **options)
