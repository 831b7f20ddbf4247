"""Section of a report on the peak memory of runs, against the forecast of ``hpctrain plan`` if torch is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.report.figures import MOST_ROWS, add_legend, new_figure, plain, rows_of_bars
from hpctrain.report.page import Section, Table
from hpctrain.report.runs import CONFIG, ReportedRun
from hpctrain.train.receipt.read import Attempt
from hpctrain.train.receipt.write import text as fact
from hpctrain.util.text import format_bytes

MOST_FORECASTS = 8  # each takes a second
_ABOUT = (
    "Peak memory until the last checkpoint: of the node that used most, without mapped files, and of the GPU that used "
    "most. The forecast is that of hpctrain plan for the settings of the run."
)
_COLOURS = {"measured": "#0072b2", "forecast": "#e69f00"}


def sections(runs: Sequence[ReportedRun]) -> Iterator[Section]:
    """Yield a section, unless no run has measured its memory."""
    measured = [(run, last) for run in runs[:MOST_ROWS] if (last := _measured(run)) is not None]
    if not measured:
        return
    rows, notes, bars = [], [], []
    forecasts = importlib.util.find_spec("torch") is not None
    for number, (run, attempt) in enumerate(measured):
        node: int | None = None
        gpu: int | None = None
        if forecasts and number < MOST_FORECASTS and (run.state.folder / CONFIG).exists():
            try:
                node, gpu = _forecast(run, attempt)
            except UsageError as error:
                notes.append(str(error))
        for where, found, expected in (
            ("node", attempt.peak_node_bytes, node),
            ("GPU", attempt.peak_device_bytes, gpu),
        ):
            if found is not None:
                ratio = "" if not expected else f"{found / expected:.2f}"
                shown = "" if not expected else format_bytes(expected, 2)
                rows.append((run.name, where, format_bytes(found, 2), shown, ratio))
                bars.append((f"{run.name}, {where}" if where == "GPU" else run.name, found, expected))
    if not forecasts:
        notes.append("Forecasts need torch, which is not installed here.")
    elif any(not (run.state.folder / CONFIG).exists() for run, _ in measured):
        notes.append("Runs of programs have no forecast: only those of hpctrain train have settings to forecast from.")
    table = Table(("run", "of a", "measured", "forecast", "measured / forecast"), rows)
    yield Section("Memory", _ABOUT, lines=notes, tables=[table], figures=[_figure(bars)])


def _measured(run: ReportedRun) -> Attempt | None:
    """Return the last start that has measured its memory."""
    known = [one for one in run.receipt.attempts if one.peak_node_bytes is not None]
    return known[-1] if known else None


def _forecast(run: ReportedRun, attempt: Attempt) -> tuple[int, int | None]:
    """Return the forecast bytes of a node and of a GPU. Raises ``UsageError`` if there is none."""
    from hpctrain.forecast.earlier import compare_memory

    device = fact(run.state.attempts[attempt.index - 1], "device") or "cpu"
    found = compare_memory(run.state.folder, attempt, "cuda" if device.startswith("cuda") else "cpu")
    return found.node_forecast, found.device_forecast


def _figure(bars: Sequence[tuple[str, int, int | None]]) -> Any:
    """Return a figure with a bar for each measurement, and a mark at its forecast."""
    names = [name for name, _, _ in bars]
    drawn = new_figure("peak memory", "GiB", "", **rows_of_bars(names))
    shown = [plain(name) for name in names]
    lengths = [found / 2**30 for _, found, _ in bars]
    items = [("measured", [drawn.hbar(y=shown, right=lengths, height=0.6, color=_COLOURS["measured"])])]
    marked = [(name, expected / 2**30) for name, (_, _, expected) in zip(shown, bars) if expected]
    if marked:
        places = {"x": [place for _, place in marked], "y": [name for name, _ in marked]}
        mark = drawn.scatter(**places, marker="dash", angle=1.5708, size=26, line_width=4, color=_COLOURS["forecast"])
        items.append(("forecast", [mark]))
    add_legend(drawn, items)
    drawn.x_range.start = 0
    return drawn
