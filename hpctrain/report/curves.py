"""Sections of a report on curves of logged values, and on the speed-up over the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter

from hpctrain.report.figures import BUCKETS, COLOURS, DASHES, MOST_LISTED, add_legend, limit, new_figure, plain
from hpctrain.report.page import Section, Table
from hpctrain.report.runs import ReportedRun, ScalingPoint, drawn_points, scaling
from hpctrain.train.metrics import TIMES
from hpctrain.train.receipt.write import maybe
from hpctrain.util.text import counted
from hpctrain.watch.curves import Curve
from hpctrain.watch.rows import thinned

MOST_CURVES = 24  # figures of logged values


def sections(runs: Sequence[ReportedRun]) -> Iterator[Section]:
    """Yield the sections on curves, and on scaling if runs have different numbers of ranks."""
    if curves := curve_figures(runs):
        left = len(curves) - MOST_CURVES
        about = f"{left} more logged values are not shown." if left > 0 else ""
        yield Section("Curves", about, figures=curves[:MOST_CURVES], small=True)
    points, unit = scaling(runs)
    if points:
        rows = [
            (str(one.ranks), str(one.runs), f"{one.rate:,.1f}", f"{one.speedup:.2f}", f"{one.efficiency:.0%}")
            for one in points
        ]
        table = Table(("ranks", "runs", f"{unit}/s", "speed-up", "efficiency"), rows)
        yield Section("Scaling", _scaling_about(runs), figures=[scaling_figure(points)], tables=[table])


def curve_figures(runs: Sequence[ReportedRun]) -> list[Any]:
    """Return a figure of each value that a run logs over its steps, with all runs in it; losses first."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    return [_curve_figure(name, runs) for name in sorted(names, key=lambda name: "loss" not in name)]


def _curve_figure(name: str, runs: Sequence[ReportedRun]) -> Any:
    points = drawn_points(runs)
    curves = {run.name: _drawn(run.curves[name], points) for run in runs if name in run.curves}
    values = [value for _, each in curves.values() for value in each]
    drawn = new_figure(_title(name), "step", "seconds" if name in TIMES else "")
    drawn.xaxis.formatter = NumeralTickFormatter(format="0,0")
    drawn.y_range.min_interval = 1e-3 * max(map(abs, values)) or 1.0  # differences below it would be exaggerated
    if name in TIMES:
        limit(drawn, values)
    if len(curves) > MOST_LISTED:
        _draw_many(drawn, name, curves)
    else:
        items = list(_draw_each(drawn, name, curves))
        if len(runs) > 1:
            add_legend(drawn, items, "below" if len(items) <= 8 else "right")
    return drawn


def _drawn(curve: Curve, points: int) -> Curve:
    """Return a part of the points of a curve, with as many digits as can be seen."""
    steps, values = thinned(curve[0], points), thinned(curve[1], points)
    return steps, [float(f"{value:.5g}") for value in values]


def _draw_each(drawn: Any, name: str, curves: Mapping[str, Curve]) -> Iterator[tuple[str, list[Any]]]:
    """Draw each curve in a style of its own; yield its name and what was drawn."""
    for number, (run, curve) in enumerate(curves.items()):
        colour, dash = _style(number)
        source = ColumnDataSource({"step": curve[0], "value": curve[1]})
        glyphs = [drawn.line("step", "value", source=source, line_width=1.6, color=colour, line_dash=dash)]
        if len(curve[0]) <= BUCKETS:
            glyphs.append(drawn.scatter("step", "value", source=source, size=5, color=colour))
        tips = [("step", "@step{0,0}"), (plain(name), "@value{0.0000}")]
        tips = [("run", _escape(run)), *tips] if len(curves) > 1 else tips
        drawn.add_tools(HoverTool(renderers=glyphs[:1], tooltips=tips, visible=False))
        yield run, glyphs


def _draw_many(drawn: Any, name: str, curves: Mapping[str, Curve]) -> None:
    """Draw the curves of many runs as one object, which names a run under the pointer."""
    source = ColumnDataSource(
        {
            "steps": [curve[0] for curve in curves.values()],
            "values": [curve[1] for curve in curves.values()],
            "run": [plain(run) for run in curves],
            "colour": [_style(number)[0] for number in range(len(curves))],
        }
    )
    lines = drawn.multi_line("steps", "values", source=source, color="colour", line_width=1.3, alpha=0.7)
    tips = [("run", "@run"), ("step", "$x{0,0}"), (plain(name), "$y{0.0000}")]
    drawn.add_tools(HoverTool(renderers=[lines], tooltips=tips, visible=False))


def _style(number: int) -> tuple[str, str]:
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _title(name: str) -> str:
    return "seconds of a step" if name == "step_seconds" else name.replace("_", " ")


def _escape(text: str) -> str:
    """Return text for a tooltip, in which ``@`` and ``$`` would name columns."""
    return text.replace("@", "(at)").replace("$", "")


# Scaling -------------------------------------------------------------------------------------------------------------


def _scaling_about(runs: Sequence[ReportedRun]) -> str:
    """Return a sentence on what the runs have in common, without which a speed-up says little."""
    batches = {(maybe(run.state.attempt, "batch"), maybe(run.state.attempt, "size")) for run in runs}
    if any(batch is None or not size for batch, size in batches):
        return "The batch of some runs is unknown: compare only runs with the same settings."
    if len({batch for batch, _ in batches}) == 1:
        return "Strong scaling: all runs have the same batch."
    if len({batch / size for batch, size in batches if batch and size}) == 1:
        return "Weak scaling: all runs have the same batch per rank."
    return "The runs have different batches, in total and per rank: rates are compared, not the time of the same work."


def scaling_figure(points: Sequence[ScalingPoint]) -> Any:
    """Return the speed-up over the number of ranks, against the ideal one."""
    ranks = [point.ranks for point in points]
    ideal = [rank / ranks[0] for rank in ranks]
    drawn = new_figure(
        f"speed-up against {counted(ranks[0], 'rank')}, logarithmic",
        "ranks",
        "speed-up",
        x_axis_type="log",
        y_axis_type="log",
    )
    drawn.xaxis.ticker = drawn.yaxis.ticker = []
    drawn.xaxis.ticker = ranks
    drawn.yaxis.ticker = [round(value, 2) for value in ideal]
    line = drawn.line(ranks, ideal, color="#999999", line_dash="dashed", line_width=1.5)
    source = ColumnDataSource(
        {
            "ranks": ranks,
            "speedup": [point.speedup for point in points],
            "efficiency": [f"{point.efficiency:.0%}" for point in points],
            "runs": [point.runs for point in points],
        }
    )
    dots = [
        drawn.line("ranks", "speedup", source=source, color=COLOURS[0], line_width=2),
        drawn.scatter("ranks", "speedup", source=source, color=COLOURS[0], size=8),
    ]
    tips = [("ranks", "@ranks"), ("speed-up", "@speedup{0.00}"), ("efficiency", "@efficiency"), ("runs", "@runs")]
    drawn.add_tools(HoverTool(renderers=dots[1:], tooltips=tips, visible=False))
    add_legend(drawn, [("measured", dots), ("ideal", [line])])
    return drawn
