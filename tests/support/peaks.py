"""Measure what memory the ranks of a run really have at their peak.

What is there between steps is found among all tensors of the process, and of node memory, which several ranks share,
the kernel says what part counts for this one (proc(5): Pss). What a step adds torch's profiler sees in the allocator,
where kernels take memory for themselves too.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def peak_of(make: Callable[[], Callable[[], None]], warm_up: int = 2) -> int:
    """Return the most bytes that this rank has in a step behind some others; ``make`` builds all and returns a step."""
    before = _tensors(), _node_memory()
    step = make()
    for _ in range(warm_up):
        step()
    there = _tensors() - before[0]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step()
    return there + _most(watched) + _node_memory() - before[1]


def _most(watched: profile) -> int:
    """Return the most that was taken from the allocator, less what was given back."""
    now = most = 0
    for one in sorted(watched.profiler.kineto_results.events(), key=lambda one: one.start_ns()):
        now += one.nbytes() if one.name() == "[memory]" else 0
        most = max(most, now)
    return most


def _tensors() -> int:
    """Return the bytes of all tensors of this process, those in shared memory left out."""
    gc.collect()
    shared = _shared_regions()
    begins = [begin for begin, _ in shared]
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu":
            storage = one.untyped_storage()
            place = bisect_right(begins, storage.data_ptr()) - 1
            if storage.data_ptr() and (place < 0 or storage.data_ptr() >= shared[place][1]):
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _shared_regions() -> list[tuple[int, int]]:
    """Return where in this process memory lies that others may map, from proc(5)'s maps."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    spans = (fields[0].split("-") for fields in lines if fields[1][3] == "s")
    return sorted((int(begin, 16), int(end, 16)) for begin, end in spans)


def _node_memory() -> int:
    """Return this process's part of the memory that processes share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["Pss_Shmem"].split()[0]) * 1024
