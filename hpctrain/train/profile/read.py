"""Reader of a run's trace: one step as a timeline to draw. Needs neither torch nor MPI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.timeline import WAITS, WORK, Timeline, TimelineSpan
from hpctrain.util.reading import read_json
from hpctrain.util.text import printable, shorten

NAME = "trace.json"
KERNELS = "trace-kernels.json.gz"  # the same spans, with the operators and kernels of the ranks
LARGEST = 2**28  # bytes


@dataclass(frozen=True)
class TraceTimes:
    """Use of the time of each traced step on each rank: seconds by name, without those of spans inside."""

    ranks: tuple[str, ...]  # the rank and its mesh coordinates
    steps: dict[int, tuple[dict[str, float], ...]]  # for each step, one for each rank


@dataclass(frozen=True)
class TracedStep:
    """One step of a run: its number, and a timeline of every rank in milliseconds."""

    path: Path
    step: int
    names: tuple[str, ...]  # of the rows: the rank and its mesh coordinates
    timeline: Timeline


def read(run: str | Path, step: int | None = None) -> TracedStep:
    """Return a step of a run folder or trace file; the default is the last step that all ranks recorded.

    The timeline extends from the first pass of any rank to the last update. It contains computation
    and waits only.
    """
    path = Path(run) / NAME if Path(run).is_dir() else Path(run)
    events = _events(path)
    spans = [event for event in events if event["ph"] == "X"]
    ranks = tuple(sorted({int(event["args"]["rank"]) for event in spans}))
    windows = _windows(spans)
    known = sorted(number for number, found in windows.items() if set(found) == set(ranks))
    if not known:
        raise UsageError(f"{path} holds no complete step")
    chosen = known[-1] if step is None else step
    if chosen not in known:
        raise UsageError(f"{path} holds no step {chosen}: it holds {known[0]} to {known[-1]}")
    return TracedStep(path, chosen, _names(events, ranks), _timeline(spans, windows[chosen], ranks))


def read_times(run: str | Path) -> TraceTimes:
    """Return the use of time in all steps of a run folder or trace file that all ranks recorded.

    A span counts without the spans inside it, so the times of a step add up to its duration; ``step`` is what no span
    covers. Only the thread that computes counts.
    """
    path = Path(run) / NAME if Path(run).is_dir() else Path(run)
    events = _events(path)
    spans = [event for event in events if event["ph"] == "X"]
    ranks = tuple(sorted({int(event["args"]["rank"]) for event in spans}))
    found: dict[int, dict[int, dict[str, float]]] = {}
    for rank in ranks:
        own = [event for event in spans if event["args"]["rank"] == rank and event.get("tid", rank) == rank]
        for step, times in _own_times(own).items():
            found.setdefault(step, {})[rank] = times
    complete = {step: times for step, times in sorted(found.items()) if set(times) == set(ranks)}
    if not complete:
        raise UsageError(f"{path} holds no complete step")
    steps = {step: tuple(times[rank] for rank in ranks) for step, times in complete.items()}
    return TraceTimes(_names(events, ranks), steps)


def _own_times(spans: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the seconds of each name in each step of one thread, in which spans are nested."""
    found: dict[int, dict[str, float]] = {}
    open_spans: list[tuple[float, str, dict[str, float]]] = []  # end, name and step's times, the innermost last
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        begin, seconds, name = event["ts"], event["dur"] / 1e6, event["name"]
        while open_spans and open_spans[-1][0] <= begin:
            open_spans.pop()
        if name == "step" and isinstance(event["args"].get("step"), int):
            times = found.setdefault(event["args"]["step"], {})
        elif open_spans:
            _, around, times = open_spans[-1]
            times[around] = times.get(around, 0.0) - seconds
        else:
            continue  # between two steps
        times[name] = times.get(name, 0.0) + seconds
        open_spans.append((begin + event["dur"], name, times))
    return {step: {name: max(seconds, 0.0) for name, seconds in times.items()} for step, times in found.items()}


def _events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file after checking the required fields of every span."""
    try:
        found: list[dict[str, Any]] = read_json(path, LARGEST)["traceEvents"]
        for event in found:
            if event["ph"] == "X":
                float(event["ts"]) + float(event["dur"]), int(event["args"]["rank"]), str(event["name"])
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: a run with train.trace = true writes it") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        reason = f"{type(error).__name__} {shorten(printable(error), 100)}"
        raise UsageError(f"{path} is not a trace of hpctrain: {reason}") from error
    return found


def _names(events: list[dict[str, Any]], ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the ranks in the file."""
    called = {event.get("tid"): event["args"].get("name") for event in events if event.get("name") == "thread_name"}
    return tuple(str(called.get(rank) or f"rank {rank}") for rank in ranks)


def _windows(spans: list[dict[str, Any]]) -> dict[int, dict[int, tuple[float, float]]]:
    """Return the start and end of each step on each rank."""
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for event in spans:
        if event["name"] == "step" and isinstance(event["args"].get("step"), int):
            window = event["ts"], event["ts"] + event["dur"]
            found.setdefault(event["args"]["step"], {})[event["args"]["rank"]] = window
    return found


def _timeline(spans: list[dict[str, Any]], windows: dict[int, tuple[float, float]], ranks: tuple[int, ...]) -> Timeline:
    rows: dict[int, list[TimelineSpan]] = {rank: [] for rank in ranks}
    for event in spans:
        rank, name = event["args"]["rank"], event["name"]
        first, last = windows[rank]
        if name in (*WORK, *WAITS) and first <= event["ts"] and event["ts"] + event["dur"] <= last:
            rows[rank].append(_span(event))
    work = [span for row in rows.values() for span in row if span.name in WORK]
    if not work:
        return Timeline(tuple(() for _ in ranks))
    updates = [span for span in work if span.name == "optimizer"]  # later spans belong to the evaluation
    begin, end = min(span.start for span in work), max(span.end for span in updates or work)
    return Timeline(tuple(tuple(_within(rows[rank], begin, end)) for rank in ranks))


def _span(event: dict[str, Any]) -> TimelineSpan:
    start, facts = event["ts"] / 1000, event["args"]
    return TimelineSpan(event["name"], start, start + event["dur"] / 1000, facts.get("chunk"), facts.get("microbatch"))


def _within(row: list[TimelineSpan], begin: float, end: float) -> list[TimelineSpan]:
    """Return the spans that overlap the interval, clipped to it."""
    return [
        TimelineSpan(span.name, max(span.start, begin), min(span.end, end), span.chunk, span.microbatch)
        for span in sorted(row, key=lambda span: (span.start, -span.end))
        if span.start < end and span.end > begin
    ]
