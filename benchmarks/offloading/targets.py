"""Performance targets of offload, and their comparison with the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offloading.names import PAIRS
from saving.targets import Target

BYTES = 28  # minimum memory traffic of AdamW per parameter
UPDATE_TARGET = 1.0  # times as fast as torch
STEP_TARGET = 1.25  # times as long as a step without offload
LARGEST_TARGET = 5.0  # times as many parameters

Times = Mapping[str, Mapping[str, float]]


def update_targets(by_threads: Mapping[str, Times]) -> Iterator[Target]:
    """Yield the speed of one pass relative to torch's passes, per number of threads."""
    for threads, times in by_threads.items():
        for ours, theirs in PAIRS:
            if ours in times and theirs in times:
                value = times[theirs]["median"] / times[ours]["median"]
                yield Target(f"{ours}: speed / torch, {count(threads)}", value, UPDATE_TARGET)


def device_targets(result: Mapping[str, Any]) -> Iterator[Target]:
    """Yield the targets of training with a GPU."""
    steps, largest = result["steps"], result["largest"]
    if "offload" in steps and "on the device" in steps:
        value = steps["offload"]["seconds"]["median"] / steps["on the device"]["seconds"]["median"]
        yield Target("step: offload / on the device", value, STEP_TARGET, at_least=False)
    if largest.get("on the device"):
        value = largest["offload"] / largest["on the device"]
        yield Target("largest model: offload / on the device", value, LARGEST_TARGET)


def rate(numel: int, seconds: float) -> float:
    """Return the bytes per second of an optimizer step with 28 bytes of traffic per parameter."""
    return BYTES * numel / seconds


def count(threads: str) -> str:
    """Return a number of threads as text."""
    return f"{threads} thread" if threads == "1" else f"{threads} threads"
