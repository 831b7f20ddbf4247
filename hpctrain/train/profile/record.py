"""Trace of selected steps of a run on every rank, on one time axis, written for Perfetto and Chrome.

The ranks of a node share a clock. The first rank of each node sends its clock to rank 0 several
times (``comm.clock_offset``).
"""

from __future__ import annotations

import json
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hpctrain import trace
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.composite import Clock, answer_clock, ask_clock, offset
from hpctrain.log import logger
from hpctrain.trace import LIMIT, Recording, Span
from hpctrain.train.profile import read
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
) -> None:
    """Write the recordings of all ranks into a file. Collective.

    ``coordinates`` are those of this rank in the mesh, as text. ``ahead`` is the number of seconds
    by which this rank's clock is ahead of rank 0's; by default it is measured. If the file cannot be written, a
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
    }
    reports = _gathered(comm, report)
    if comm.rank == 0:
        if dropped := sum(each["dropped"] for each in reports):
            logger.warning("%s lacks %d spans, beyond %d per rank: trace fewer steps", path, dropped, LIMIT)
        try:
            _write(path, reports)
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


def _write(path: Path, reports: Sequence[Report]) -> None:
    """Write one event per line, under a temporary name until the file is complete."""
    facts = {"format": FORMAT, "ranks": len(reports), "dropped": sum(each["dropped"] for each in reports)}
    head = f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n'
    with atomic.replacing(path) as file:
        file.write(head.encode())
        for number, event in enumerate(events(reports)):
            file.write(((",\n" if number else "") + json.dumps(event)).encode())
        file.write(b"\n]}\n")


def events(reports: Sequence[Report]) -> Iterator[Event]:
    """Yield the events of all ranks: for each rank the names of its node and threads, then its spans by time."""
    origin = min((start for report in reports for _, start, *_ in report["spans"]), default=0)
    for report in reports:
        threads = list(dict.fromkeys(thread for *_, thread, _ in _main_first(report["spans"])))
        # The first thread of a rank has the rank's number, others have unique numbers.
        numbers = {thread: report["rank"] + index * len(reports) for index, thread in enumerate(threads)}
        yield from _names(report, list(numbers.values()))
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


def _main_first(spans: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return the spans sorted so that those of the thread that runs the steps come first."""
    main = next((span[3] for span in spans if span[0] == "step"), None)
    return sorted(spans, key=lambda span: span[3] != main)


def _names(report: Report, threads: Sequence[int]) -> Iterator[Event]:
    node, host = report["node"], report["host"]
    yield _name("process_name", node, None, f"node {node}" + (f" ({host})" if host else ""))
    for index, thread in enumerate(threads or [report["rank"]]):
        where = f" ({report['coordinates']})" if report["coordinates"] else ""
        more = f", thread {index + 1}" if index else ""
        yield _name("thread_name", node, thread, f"rank {report['rank']}{where}{more}")
        yield {"name": "thread_sort_index", "ph": "M", "pid": node, "tid": thread, "args": {"sort_index": thread}}


def _name(kind: str, pid: int, tid: int | None, text: str) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, **({} if tid is None else {"tid": tid}), "args": {"name": text}}


# Trace of selected steps of a run on every rank, written to a file after the last of these steps ----------------------


class Tracing:
    """Recorder of the steps ``first`` to ``last``, counted from this start of the run.

    Every rank calls ``begin_step`` and ``end_step`` around every step. ``close`` is collective and
    writes the recording of a run that ended early. ``abandon`` is local to a rank. ``coordinates``
    are those of this rank in the mesh, as text. ``synchronize`` is called before the ranks write
    together.
    """

    def __init__(
        self,
        comm: Communicator,
        folder: Path,
        steps: Sequence[int] | None,
        coordinates: str = "",
        synchronize: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._comm, self._path, self._synchronize = comm, folder / read.NAME, synchronize
        self._coordinates = coordinates
        self._first, self._last = steps or (0, 0)
        self._count = 0
        self._recording = False
        self._began: tuple[int, float] | None = None

    def begin_step(self, step: int) -> None:
        """Begin update number ``step``, counted over all resumes."""
        self._count += 1
        if self._count == self._first:
            trace.start()
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
            self._recording = False
            self._synchronize("the writing of the trace")
            merge_traces(self._comm, trace.take(), self._path, coordinates=self._coordinates, host=socket.gethostname())

    def abandon(self) -> None:
        if self._recording:
            self._recording = False
            trace.take()
