"""Parts that all figures of a report share: colours, axes, legends, tooltips. Bokeh draws them.

Every figure has tooltips and can be zoomed; a click on a name in a legend hides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bokeh.models import FactorRange, HoverTool
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure

from hpctrain.util.text import format_number

# Colours that people with colour blindness tell apart (Okabe and Ito), repeated with other line styles.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#a0522d")
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
# Uses of time, in drawing order, with their colours.
USES = {
    "data": "#e69f00",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "forward, backward and other": "#0072b2",
    "loss": "#00487a",
    "optimizer": "#009e73",
    "send": "#f2b5a0",
    "receive": "#d55e00",
    "reduce": "#cc5b5b",
    "wait": "#cc79a7",
    "communication": "#d55e00",
    "checkpoint": "#7a5195",
    "saving": "#7a5195",
    "evaluation": "#bc80bd",
    "device": "#a6bddb",
    "other": "#c9c9c9",
}
HEIGHT = 280
MOST_LISTED = 20  # names in a legend: more would cover the figure
MOST_ROWS = 64  # bars or ranks beside each other
BUCKETS = 60  # bars over the steps


def plain(text: object) -> str:
    """Return text that Bokeh draws as it is: it would take some characters for formulas."""
    return str(text).replace("$$", "$ $").replace("\\[", "\\ [").replace("\\(", "\\ (")


def new_figure(title: str, x: str, y: str, *, height: int = HEIGHT, **options: Any) -> Any:
    found = figure(
        title=plain(title),
        x_axis_label=x,
        y_axis_label=y,
        height=height,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,wheel_zoom,reset,save",
        active_scroll=None,
        **options,
    )
    found.toolbar.logo, found.toolbar.autohide = None, True
    found.xgrid.grid_line_color = found.ygrid.grid_line_color = "#ececec"
    found.outline_line_color = None
    return found


def add_legend(drawn: Any, items: Sequence[tuple[str, Sequence[Any]]], place: str = "right") -> None:
    legend = Legend(items=[LegendItem(label=plain(name), renderers=list(glyphs)) for name, glyphs in items])
    if place == "below":
        legend.orientation, legend.ncols = "horizontal", 4
    legend.click_policy = "hide"
    legend.border_line_color, legend.label_text_font_size = None, "9pt"
    drawn.add_layout(legend, place)


def describe(drawn: Any, bars: Sequence[Any], uses: Sequence[str], of: str) -> None:
    for bar, use in zip(bars, uses):
        tips = [(of, f"@{of}"), (use, f"@{{{use}}}{{0.00}} ms")]
        drawn.add_tools(HoverTool(renderers=[bar], tooltips=tips, visible=False))
    add_legend(drawn, [(use, [bar]) for use, bar in zip(uses, bars)])


def rows_of_bars(names: Sequence[str], height: int = 26) -> dict[str, Any]:
    """Return options of a figure with a horizontal bar for each name, the first one on top."""
    shown = [plain(name) for name in reversed(names)]
    return {"height": max(height * len(shown) + 110, 180), "y_range": FactorRange(factors=shown)}


def limit(drawn: Any, heights: Sequence[float]) -> None:
    """Show the usual heights of a figure, if few are several times as high, as those of steps with an evaluation."""
    drawn.y_range.start = 0
    usual, most = sorted(heights)[int(0.95 * (len(heights) - 1))], max(heights)
    if most > 3 * usual:
        drawn.y_range.end = 1.6 * usual
        drawn.title.text += f" (highest: {format_number(most)})"
