"""Trace of selected steps of a run on every rank, on one time axis, written for Perfetto and Chrome.

The ranks of a node share a clock. The first rank of each node sends its clock to rank 0 several
times (``comm.clock_offset``).
"""

from __future__ import annotations

import gzip
import json
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hpctrain import trace
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.composite import Clock, answer_clock, ask_clock, offset
from hpctrain.log import logger
from hpctrain.trace import LIMIT, Recording, Span
from hpctrain.train.profile import read
from hpctrain.train.profile.kernels import Activities, KernelRecorder, file_events
from hpctrain.util import atomic

ROUNDS = 24


def clock_offsets(
    comm: Communicator, *, clock: Clock = time.monotonic, nodes: Sequence[int] | None = None
) -> list[float]:
    """Return the seconds by which each rank's clock is ahead of rank 0's. Collective.

    ``nodes`` are the nodes of the ranks, if they differ from those of the communicator.
    """
    node_of_rank = list(nodes) if nodes is not None else comm.all_gather_object(comm.node)
    found = {node_of_rank[0]: 0.0}
    for rank, node in enumerate(node_of_rank):
        if node not in found:
            found[node] = _ahead(comm, rank, clock)
    everyone = comm.broadcast_object(found)  # only rank 0 has measured
    return [everyone[node] for node in node_of_rank]


def _ahead(comm: Communicator, peer: int, clock: Clock) -> float:
    """Return on rank 0 the seconds by which the peer's clock is ahead."""
    if comm.rank == 0:
        return offset(ask_clock(comm, peer, ROUNDS, clock))[0]
    if comm.rank == peer:
        answer_clock(comm, 0, ROUNDS, clock)
    return 0.0


# Trace file of all ranks for Perfetto (ui.perfetto.dev) and Chrome (about:tracing) ------------------------------------
#
# The format is Chrome's trace events: one process per node, one thread per rank, one event of phase
# ``X`` per span, times in microseconds. ``hpctrain plan --measured`` draws the same file.

FORMAT = "hpctrain-trace"
_MOST_ROWS = 1000  # of a rank, so that the rows of a rank follow one another
_CATEGORIES = {
    "step": ("step",),
    "communication": ("send", "receive", "reduce", "wait"),
    "input and output": ("data", "checkpoint"),
}

Event = dict[str, Any]
Report = dict[str, Any]  # of one rank: its mesh coordinates and its spans


def merge_traces(
    comm: Communicator,
    recording: Recording,
    path: Path,
    *,
    coordinates: str = "",
    host: str = "",
    ahead: float | None = None,
    activities: Activities | None = None,
) -> None:
    """Write the recordings of all ranks into a file, and with their activities, if any, into a second one. Collective.

    ``coordinates`` are those of this rank in the mesh, as text. ``ahead`` is the number of seconds
    by which this rank's clock is ahead of rank 0's; by default it is measured. If a file cannot be written, a
    warning is logged and the run continues.
    """
    if ahead is None:
        ahead = clock_offsets(comm)[comm.rank]
    report = {
        "rank": comm.rank,
        "node": comm.node,
        "host": host,
        "coordinates": coordinates,
        "dropped": recording.dropped,
        "spans": [_plain(span, ahead) for span in recording.spans],
        "ahead": round(ahead * 1e9),
        "activities": None if activities is None else asdict(activities),
    }
    reports = _gathered(comm, report)
    if comm.rank == 0:
        if dropped := sum(each["dropped"] for each in reports):
            logger.warning("%s lacks %d spans, beyond %d per rank: trace fewer steps", path, dropped, LIMIT)
        try:
            _write(path, reports, events(reports))
            if recorded := [each["rank"] for each in reports if each["activities"] is not None]:
                path = path.with_name(read.KERNELS)
                if dropped := sum(reports[rank]["activities"]["dropped"] for rank in recorded):
                    logger.warning(
                        "%s lacks %d activities, beyond %d per rank: trace fewer steps", path, dropped, LIMIT
                    )
                _write(path, reports, events(reports, kernels=True), compress=True)
        except OSError as error:
            logger.warning("cannot write %s: %s; continuing without", path, error.strerror)


def _plain(span: Span, ahead: float) -> list[Any]:
    """Return a span as a row in integer nanoseconds of rank 0's clock; integers preserve the nesting."""
    return [span.name, round((span.start - ahead) * 1e9), round((span.end - ahead) * 1e9), span.thread, span.facts]


def _gathered(comm: Communicator, report: Report) -> list[Report]:
    """Return the reports of all ranks on rank 0; the other ranks need no memory for them."""
    data = zlib.compress(json.dumps(report, default=str).encode())
    sizes: list[int] = comm.all_gather_object(len(data))
    longest = max(sizes)
    own = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    whole = torch.empty(longest * comm.size, dtype=torch.uint8) if comm.rank == 0 else None
    comm.gather(whole, own)
    if whole is None:
        return []
    parts = whole.view(comm.size, longest)
    return [json.loads(zlib.decompress(part[:size].numpy().tobytes())) for part, size in zip(parts, sizes)]


def _write(path: Path, reports: Sequence[Report], found: Iterator[Event], *, compress: bool = False) -> None:
    """Write one event per line, under a temporary name until the file is complete."""
    facts = {"format": FORMAT, "ranks": len(reports), "dropped": sum(each["dropped"] for each in reports)}
    head = f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n'
    with atomic.replacing(path) as file, gzip.open(file, "wb", 6) if compress else nullcontext(file) as text:
        text.write(head.encode())
        for number, event in enumerate(found):
            text.write(((",\n" if number else "") + json.dumps(event)).encode())
        text.write(b"\n]}\n")


def events(reports: Sequence[Report], *, kernels: bool = False) -> Iterator[Event]:
    """Yield the events of all ranks: for each rank the names of its node and threads, then its spans by time.

    With ``kernels``, the activities of each rank follow, on rows of their own.
    """
    none = asdict(Activities())
    found = [(report.get("activities") if kernels else None) or none for report in reports]
    starts = [start for report in reports for _, start, *_ in report["spans"]]
    starts += [event[3] - report["ahead"] for report, each in zip(reports, found) for event in each["events"]]
    origin = min(starts, default=0)
    for report, activities in zip(reports, found):
        threads = list(dict.fromkeys(thread for *_, thread, _ in _main_first(report["spans"])))
        # The first thread of a rank has the rank's number, others have unique numbers.
        spare = [
            report["rank"] + index * len(reports) for index in range(max(len(threads), 1) + len(activities["rows"]))
        ]
        numbers, rows = dict(zip(threads, spare)), spare[max(len(threads), 1) :]
        yield from _names(report, list(numbers.values()), dict(zip(rows, activities["rows"])))
        for name, start, end, thread, facts in sorted(report["spans"], key=lambda span: (span[1], -span[2])):
            yield {
                "name": name,
                "cat": next((kind for kind, names in _CATEGORIES.items() if name in names), "computation"),
                "ph": "X",
                "ts": (start - origin) / 1000,
                "dur": (end - start) / 1000,
                "pid": report["node"],
                "tid": numbers[thread],
                "args": {"rank": report["rank"], **facts},
            }
        yield from file_events(report["rank"], report["node"], activities, origin + report.get("ahead", 0), rows)


def _main_first(spans: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return the spans sorted so that those of the thread that runs the steps come first."""
    main = next((span[3] for span in spans if span[0] == "step"), None)
    return sorted(spans, key=lambda span: span[3] != main)


def _names(report: Report, threads: Sequence[int], rows: dict[int, str]) -> Iterator[Event]:
    """Yield the names of a rank's node, threads and rows of activities, which follow the rank's threads."""
    node, host, rank = report["node"], report["host"], report["rank"]
    yield _name("process_name", node, None, f"node {node}" + (f" ({host})" if host else ""))
    where = f" ({report['coordinates']})" if report["coordinates"] else ""
    for index, thread in enumerate(threads or [rank]):
        rows = {**rows, thread: f"thread {index + 1}" if index else ""}
    for index, (thread, title) in enumerate(sorted(rows.items())):
        yield _name("thread_name", node, thread, f"rank {rank}{where}" + (f", {title}" if title else ""))
        place = {"sort_index": rank * _MOST_ROWS + index}
        yield {"name": "thread_sort_index", "ph": "M", "pid": node, "tid": thread, "args": place}


def _name(kind: str, pid: int, tid: int | None, text: str) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, **({} if tid is None else {"tid": tid}), "args": {"name": text}}


# Trace of selected steps of a run on every rank, written to a file after the last of these steps ----------------------


class Tracing:
    """Recorder of the steps ``first`` to ``last``, counted from this start of the run.

    Every rank calls ``begin_step`` and ``end_step`` around every step. ``close`` is collective and
    writes the recording of a run that ended early. ``abandon`` is local to a rank. ``coordinates``
    are those of this rank in the mesh, as text. ``kernels`` records operators and kernels, too.
    With ``together``, all ranks wait until it has started. ``synchronize`` is called before the ranks write together.
    """

    def __init__(
        self,
        comm: Communicator,
        folder: Path,
        steps: Sequence[int] | None,
        coordinates: str = "",
        kernels: KernelRecorder | None = None,
        together: bool = False,
        synchronize: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._comm, self._path, self._synchronize = comm, folder / read.NAME, synchronize
        self._coordinates = coordinates
        self._first, self._last = steps or (0, 0)
        self._kernels, self._together = kernels, together
        self._count = 0
        self._recording = False
        self._began: tuple[int, float] | None = None

    def begin_step(self, step: int) -> None:
        """Begin update number ``step``, counted over all resumes."""
        self._count += 1
        if self._count == self._first:
            if self._kernels is not None:
                self._kernels.start()
            if self._together:  # the first start takes seconds, which are not those of the step
                self._comm.barrier()
            trace.start(ranges=self._kernels and self._kernels.ranges)
            self._recording = True
        if self._recording:
            self._began = step, time.monotonic()

    def end_step(self) -> None:
        """End the step; after the last requested step, write the file."""
        if self._began is not None:
            step, began = self._began
            self._began = None
            trace.add("step", began, time.monotonic(), step=step)
        if self._count == self._last:
            self.close()

    def close(self) -> None:
        """Write the recording if it has not been written."""
        if self._recording:
            recording, activities = self._take()
            self._synchronize("the writing of the trace")
            host, place = socket.gethostname(), self._coordinates
            merge_traces(self._comm, recording, self._path, coordinates=place, host=host, activities=activities)
        elif 0 < self._count < self._first and self._comm.rank == 0:
            text = "no trace was written: this start of the run had %d steps, the first one to trace is %d"
            logger.warning(text, self._count, self._first)
            self._first = 0

    def abandon(self) -> None:
        if self._recording:
            self._take()

    def _take(self) -> tuple[Recording, Activities | None]:
        self._recording = False
        return trace.take(), None if self._kernels is None else self._kernels.stop()
