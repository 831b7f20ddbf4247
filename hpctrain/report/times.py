"""Sections of a report on what the time was used for: over the steps, on each rank, within a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from bokeh.models import FactorRange, HoverTool, NumeralTickFormatter

from hpctrain.report.figures import (
    BUCKETS,
    COLOURS,
    MOST_ROWS,
    USES,
    add_legend,
    describe,
    limit,
    new_figure,
    plain,
    rows_of_bars,
)
from hpctrain.report.page import Section
from hpctrain.report.runs import ReportedRun
from hpctrain.train.metrics import uses_of
from hpctrain.train.profile.read import TracedStep
from hpctrain.train.receipt.write import maybe
from hpctrain.watch.rows import Row

MOST_DETAILED = 5  # runs with figures of their own in a page of several
_MOST_SPANS = 3000
_ABOUT = "data: waiting for the loader; communication: waiting for other ranks."
_UNTRACED = " Figures of single ranks need a trace (train.trace = true)."


def sections(runs: Sequence[ReportedRun]) -> Iterator[Section]:
    """Yield a section that compares the runs, if there are several, and one for each of the first ones."""
    several = len(runs) > 1
    if several and (compared := use_of_runs(runs)) is not None:
        yield Section("Use of time", _ABOUT, figures=[compared])
    for run in runs[:MOST_DETAILED]:
        step = None if run.step is None else step_timeline(run.step)
        drawn = [each for each in (use_over_steps(run), use_of_ranks(run), use_of_steps(run), step) if each is not None]
        if drawn:
            title, about = (f"Use of time of {run.name}", "") if several else ("Use of time", _ABOUT)
            about += "" if several or run.times is not None else _UNTRACED
            yield Section(title, about, figures=drawn, closed=several)


_MEASURED = ("step_seconds", "data_seconds", "communication_seconds", "optimizer_seconds")  # by every version


def _timed_rows(run: ReportedRun) -> list[Row]:
    return [row for row in run.rows if all(maybe(row, name) is not None for name in _MEASURED)]


def _means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean milliseconds of each use in a step."""
    # Batches that are fetched ahead are loaded within the step, others and checkpoints before it.
    whole = sum(float(row["step_seconds"]) for row in rows)
    outside = sum(maybe(row, name) or 0.0 for row in rows for name in ("data_seconds", "save_seconds"))
    found = uses_of(rows, whole + outside)
    return {use: float(f"{1000 * seconds / len(rows):.4g}") for use, seconds in found.items()}


def _columns(means: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values of each use in some means, in the order of their colours."""
    known = {use for each in means for use in each}
    return {use: [each.get(use, 0.0) for each in means] for use in USES if use in known}


def use_over_steps(run: ReportedRun) -> Any | None:
    """Return a figure of the use of the time of a step over the steps, of rank 0; None if the rows have no times."""
    rows = _timed_rows(run)
    if len(rows) < 2:
        return None
    count = min(BUCKETS, len(rows))
    parts = [rows[number * len(rows) // count : (number + 1) * len(rows) // count] for number in range(count)]
    steps = [float(part[len(part) // 2]["step"]) for part in parts]
    columns = _columns([_means(part) for part in parts])
    width = (steps[-1] - steps[0]) / max(count - 1, 1) * 0.9
    drawn = new_figure("use of the time of a step, on rank 0", "step", "milliseconds")
    drawn.xaxis.formatter = NumeralTickFormatter(format="0,0")
    _stack(drawn, {"step": steps, **columns}, "step", list(columns), width)
    limit(drawn, [sum(each) for each in zip(*columns.values())])
    return drawn


def use_of_runs(runs: Sequence[ReportedRun]) -> Any | None:
    """Return a figure of the mean use of the time of a step in each run, on rank 0; None if no run has times."""
    means: dict[str, dict[str, float]] = {}
    for run in runs[:MOST_ROWS]:
        rows = _timed_rows(run)
        usual = 5 * median([float(row["step_seconds"]) for row in rows]) if rows else 0.0
        if rows := [row for row in rows if row["step_seconds"] <= usual]:
            means[plain(run.name)] = _means(rows)
    if not means:
        return None
    columns = _columns(list(means.values()))
    title = "use of the time of a step on rank 0, mean of steps without an evaluation"
    return _stacked_bars(title, "run", list(columns), {"run": list(means), **columns})


def use_of_ranks(run: ReportedRun) -> Any | None:
    """Return a figure of the use of time on each rank, the mean of the traced steps; None without a trace."""
    if run.times is None:
        return None
    steps = list(run.times.steps.values())
    uses = _uses(steps)
    ranks = [plain(name) for name in run.times.ranks[:MOST_ROWS]]
    columns: dict[str, list[Any]] = {"rank": ranks}
    for use in uses:
        sums = [sum(_use(step[rank], use) for step in steps) for rank in range(len(ranks))]
        columns[use] = [1000 * each / len(steps) for each in sums]
    first, last = min(run.times.steps), max(run.times.steps)
    title = f"use of the time of a step on each rank, mean of steps {first} to {last}"
    return _stacked_bars(title, "rank", uses, columns)


def _stacked_bars(title: str, of: str, uses: Sequence[str], columns: Mapping[str, list[Any]]) -> Any:
    """Return a figure with a bar for each name in the column ``of``, divided into the uses."""
    drawn = new_figure(title, "milliseconds", "", **rows_of_bars(columns[of]))
    colours = [USES[use] for use in uses]
    bars = drawn.hbar_stack(list(uses), y=of, height=0.8, color=colours, source=dict(columns))
    describe(drawn, bars, uses, of)
    drawn.x_range.start = 0
    return drawn


def use_of_steps(run: ReportedRun) -> Any | None:
    """Return a figure of the use of time in each traced step, on the rank that worked longest in it."""
    if run.times is None:
        return None
    steps = list(run.times.steps)
    uses = _uses(list(run.times.steps.values()))
    columns: dict[str, list[Any]] = {"step": [f"{step:,}" for step in steps], **{use: [] for use in uses}}
    for times in run.times.steps.values():
        slowest = max(times, key=_work)
        for use in uses:
            columns[use].append(1000 * _use(slowest, use))
    title = "use of the time of each traced step, on the rank that waited least"
    drawn = new_figure(title, "step", "milliseconds", x_range=FactorRange(factors=columns["step"]))
    _stack(drawn, columns, "step", uses, 0.8)
    drawn.y_range.start = 0
    return drawn


def _uses(steps: Sequence[Sequence[Mapping[str, float]]]) -> list[str]:
    known = {name for step in steps for times in step for name, seconds in times.items() if seconds > 0}
    return [use for use in USES if use in known or (use == "other" and known - set(USES))]


def _use(times: Mapping[str, float], use: str) -> float:
    """Return the seconds of a use; ``other`` is everything without a colour of its own."""
    if use != "other":
        return times.get(use, 0.0)
    return sum(seconds for name, seconds in times.items() if name == "other" or name not in USES)


def _work(times: Mapping[str, float]) -> float:
    waits = ("send", "receive", "reduce", "wait")
    return sum(seconds for name, seconds in times.items() if name not in waits)


def _stack(drawn: Any, columns: Mapping[str, Any], x: str, uses: Sequence[str], width: float) -> None:
    bars = drawn.vbar_stack(list(uses), x=x, width=width, color=[USES[use] for use in uses], source=dict(columns))
    describe(drawn, bars, uses, x)


def step_timeline(step: TracedStep) -> Any:
    """Return a timeline of the passes and waits of each rank in one step."""
    most = _MOST_SPANS // min(len(step.names), MOST_ROWS)
    shown = list(zip(step.names[:MOST_ROWS], step.timeline.rows))
    spans = [(name, span) for name, row in shown for span in row[:most]]
    begin = step.timeline.start
    columns: dict[str, list[Any]] = {
        "rank": [plain(name) for name, _ in spans],
        "name": [span.name for _, span in spans],
        "start": [span.start - begin for _, span in spans],
        "end": [span.end - begin for _, span in spans],
        "milliseconds": [span.end - span.start for _, span in spans],
        "microbatch": ["" if span.microbatch is None else str(span.microbatch) for _, span in spans],
        "stage": ["" if span.chunk is None else str(span.chunk) for _, span in spans],
    }
    ranks = [plain(name) for name in step.names[:MOST_ROWS]]
    title = f"step {step.step:,}: idle {step.timeline.bubble:.0%} of the time of all ranks"
    if any(len(row) > most for _, row in shown):
        title += f" (the first {most:,} passes and waits of each rank)"
    drawn = new_figure(title, "milliseconds", "", **rows_of_bars(ranks))
    items = []
    for name in dict.fromkeys(columns["name"]):
        part = {
            column: [value for value, of in zip(values, columns["name"]) if of == name]
            for column, values in columns.items()
        }
        colour = USES.get(name, COLOURS[6])
        edges = {"line_color": "white", "line_width": 0.5}
        bars = drawn.hbar(y="rank", left="start", right="end", height=0.8, source=part, color=colour, **edges)
        tips = [("", "@name of @rank"), ("", "@milliseconds{0.000} ms from @start{0.000} ms on")]
        tips += [("microbatch", "@microbatch")] if any(part["microbatch"]) else []
        tips += [("stage", "@stage")] if len(set(columns["stage"])) > 2 else []
        drawn.add_tools(HoverTool(renderers=[bars], tooltips=tips, visible=False))
        items.append((name, [bars]))
    add_legend(drawn, items)
    return drawn
