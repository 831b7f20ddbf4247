"""Measured peak memory of the ranks of a run, by torch's allocator and by Linux.

Neither source knows of tensors. torch's profiler watches the allocator and also sees the workspace of kernels; for node
memory the Linux kernel reports this process's proportional share (proc(5): Pss). The profiler does not see memory that
other threads allocate or free.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

_LAST = "the step that is measured"


def peak_of(make: Callable[[], Callable[[], None]], warm_up: int = 2) -> int:
    """Return this rank's peak bytes in a step after some others; ``make`` builds everything and returns a step."""
    gc.collect()
    before = _node_memory()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        step = make()
        for _ in range(warm_up):
            step()
        with record_function(_LAST):
            step()
        shared = _node_memory() - before
    return _most(watched) + shared


def _most(watched: profile) -> int:
    """Return the most bytes that were allocated at once during the last step."""
    events = sorted(watched.profiler.kineto_results.events(), key=lambda one: one.start_ns())
    last = next(one for one in events if one.name() == _LAST)
    now = most = 0
    for one in events:
        if one.name() == "[memory]":
            now += one.nbytes()
            inside = last.start_ns() <= one.start_ns() <= last.start_ns() + last.duration_ns()
            most = max(most, now) if inside else most
    return most


def _node_memory() -> int:
    """Return this process's proportional share of memory shared between processes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["Pss_Shmem"].split()[0]) * 1024
