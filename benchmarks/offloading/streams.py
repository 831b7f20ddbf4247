"""Concurrent work of a step from a profile: kernels, copies in both directions, the host's optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from offloading.plot import Timeline
from offloading.training import Training

UPDATES = ("_fused_adamw_", "_fused_adam_")


class Event(NamedTuple):
    """Event of a profile; times in nanoseconds."""

    name: str
    on_device: bool
    begin: int
    length: int


def profile(training: Training) -> list[Event]:
    """Return the profiled events of one step."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    everywhere = _ExperimentalConfig(profile_all_threads=True)  # the optimizer has threads of its own
    with torch.profiler.profile(activities=activities, experimental_config=everywhere) as found:
        training.step()
    assert found.profiler is not None, "it has just ended"
    results: Any = found.profiler.kineto_results
    cpu = torch._C._autograd.DeviceType.CPU
    return [
        Event(each.name(), each.device_type() != cpu, each.start_ns(), each.duration_ns()) for each in results.events()
    ]


def timeline(events: Iterable[Event]) -> Timeline:
    """Return the plotted work, in seconds from its start."""
    kinds = [(kind, event) for event in events if (kind := kind_of(event))]
    first = min((event.begin for _, event in kinds), default=0)
    return [(kind, (event.begin - first) / 1e9, event.length / 1e9) for kind, event in kinds]


def kind_of(event: Event) -> str:
    """Return the kind of an event: kernels, down, up, update, or '' for others."""
    if not event.on_device:
        return "update" if event.name.endswith(UPDATES) else ""
    if event.name.startswith("Memcpy DtoH"):
        return "down"
    if event.name.startswith("Memcpy HtoD"):
        return "up"
    return "" if event.name.startswith(("Memcpy", "Memset")) else "kernels"


def busy(line: Timeline) -> dict[str, float]:
    """Return the busy seconds of each kind, without double counting of concurrent streams or threads."""
    return {kind: _covered([(a, a + b) for which, a, b in line if which == kind]) for kind in {one[0] for one in line}}


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
