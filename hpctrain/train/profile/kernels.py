"""Operators and GPU kernels of this process in the traced steps, from torch.profiler, on the clock of the spans.

The profiler has a clock of its own. Short markers whose times are also taken by ``time.monotonic`` show the
difference: the shortest of them are known to a few microseconds. The recording of a rank is plain data, so that
rank 0 can write those of all ranks into one file.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpctrain.log import logger
from hpctrain.trace import LIMIT

MARKER = "hpctrain: time of the clock"
_MARKERS = 16
# Categories of torch.profiler's events: those of operators, and those of devices.
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_ARROWS = ("ac2g", "fwdbwd")  # from a launch to its kernel, from a forward to its backward operator
# Facts of an event that are shown, by the name that they have in the file.
_FACTS = {"stream": "stream", "grid": "grid", "block": "block", "bytes": "bytes", "correlation": "correlation"}

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Activities:
    """Recorded activities; times are nanoseconds of ``time.monotonic``.

    ``rows`` are the names of threads and streams. An event is its row, name, category, start, duration and
    facts; an arrow is its row, category, time, number and whether it ends here.
    """

    rows: list[str] = field(default_factory=list)
    events: list[list[Any]] = field(default_factory=list)
    arrows: list[list[Any]] = field(default_factory=list)
    dropped: int = 0


class KernelRecorder:
    """Recorder of this process, which only ``records`` if this rank was chosen.

    If the program itself uses torch.profiler at that time, a warning is logged instead.
    """

    def __init__(self, records: bool = True) -> None:
        self.records = records
        self._profiler: Any = None
        self._marks: list[tuple[int, int]] = []

    def start(self) -> None:
        if not self.records:
            return
        from torch.profiler import ProfilerActivity, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes lines about its start and its end
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            logger.warning("torch.profiler is in use by the program: the trace has no kernels of this rank")
            return
        profiler = profile(activities=activities)
        try:
            profiler.start()
        except Exception as error:  # of a driver, or of a library that counts in another way
            logger.warning("the trace has no kernels of this rank, torch.profiler does not start: %s", error)
            return
        self._profiler, self._marks = profiler, list(_marks())

    @property
    def ranges(self) -> Any:
        """Where spans are shown to Nsight Systems; None without a GPU."""
        return torch.cuda.nvtx if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def stop(self) -> Activities | None:
        """End the recording and return it, None without one; the kernels that were launched are part of it."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        try:
            return self._taken(profiler)
        except Exception as error:  # the program may have used torch.profiler itself, which replaces ours
            logger.warning("the trace has no kernels of this rank, torch.profiler failed or was used twice: %s", error)
            return None

    def _taken(self, profiler: Any) -> Activities:
        self._marks += _marks()
        profiler.stop()
        with tempfile.TemporaryDirectory(prefix="hpctrain-kernels-") as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            found: list[Event] = json.loads(path.read_bytes())["traceEvents"]
        return activities_of(found, self._marks)


def _marks() -> Iterator[tuple[int, int]]:
    """Yield the times before and after each of several markers in the profiler's recording."""
    for _ in range(_MARKERS):
        before = time.monotonic_ns()
        with torch.profiler.record_function(MARKER):
            pass
        yield before, time.monotonic_ns()


def activities_of(found: Sequence[Event], marks: Sequence[tuple[int, int]]) -> Activities:
    """Return the activities among the events of a Chrome trace of torch.profiler.

    ``marks`` are the times of ``time.monotonic_ns`` around each marker.
    """
    ahead = _ahead(
        [event for event in found if event["name"] == MARKER and event.get("cat") == "user_annotation"], marks
    )
    wanted = [event for event in found if event.get("cat") in (*_HOST, *_DEVICE) and event["name"] != MARKER]
    numbers = {row: index for index, row in enumerate(dict.fromkeys(map(_row, _devices_last(wanted))))}
    events = [
        [
            numbers[_row(event)],
            event["name"],
            event["cat"],
            _nanoseconds(event["ts"]) - ahead,
            _nanoseconds(event["dur"]),
            {name: event["args"][key] for name, key in _FACTS.items() if key in event.get("args", {})},
        ]
        for event in wanted[:LIMIT]
    ]
    names = {(event["pid"], event["tid"]): numbers[_row(event)] for event in wanted}
    arrows = [
        [
            names[event["pid"], event["tid"]],
            event["cat"],
            _nanoseconds(event["ts"]) - ahead,
            event["id"],
            event["ph"] == "f",
        ]
        for event in found
        if event.get("cat") in _ARROWS and event["ph"] in "sf" and (event["pid"], event["tid"]) in names
    ]
    return Activities(list(_titles(numbers)), events, arrows[: 2 * LIMIT], max(len(wanted) - LIMIT, 0))


def _ahead(found: Iterable[Event], marks: Sequence[tuple[int, int]]) -> int:
    """Return the nanoseconds by which the profiler's clock is ahead: the middle of what all markers allow."""
    shown = sorted((_nanoseconds(event["ts"]), _nanoseconds(event["dur"])) for event in found)
    if len(shown) != len(marks):
        raise ValueError(f"torch.profiler recorded {len(shown)} of {len(marks)} markers")
    # A marker begins after the first time and ends before the second one.
    highest = min(start - before for (start, _), (before, _) in zip(shown, marks))
    lowest = max(start + length - after for (start, length), (_, after) in zip(shown, marks))
    return (lowest + highest) // 2


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def _row(event: Event) -> tuple[bool, Any, Any]:
    return event["cat"] in _DEVICE, event["pid"], event["tid"]


def _devices_last(events: Sequence[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event["cat"] in _DEVICE, event["ts"]))


def _titles(rows: Iterable[tuple[bool, Any, Any]]) -> Iterator[str]:
    threads = 0
    for is_device, device, stream in rows:
        if is_device:
            yield f"GPU {device}, stream {stream}"
        else:
            threads += 1
            yield "operators" if threads == 1 else f"operators, thread {threads}"


# Events of the file that rank 0 writes --------------------------------------------------------------------------------


def file_events(
    rank: int, node: int, activities: Mapping[str, Any], origin: int, numbers: Sequence[int]
) -> Iterator[Any]:
    """Yield the events of a rank in the format of Chrome: each row is a thread with one of the numbers."""
    for row, name, category, start, length, facts in activities["events"]:
        yield {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": (start - origin) / 1000,
            "dur": length / 1000,
            "pid": node,
            "tid": numbers[row],
            "args": {"rank": rank, **facts},
        }
    for row, category, at, number, ends in activities["arrows"]:
        yield {
            "name": category,
            "cat": category,
            "ph": "f" if ends else "s",
            "id": rank * 2**32 + number,
            "ts": (at - origin) / 1000,
            "pid": node,
            "tid": numbers[row],
            **({"bp": "e"} if ends else {}),
        }
