"""Plots of forecasts: memory of configurations as stacked bars, and samples per second over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.forecast.candidates import Configuration
from hpctrain.forecast.memory import CATEGORIES
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.scaling import Curve
from hpctrain.util.plotting import INK, add_grid, check_suffix, new_figure, save_figure
from hpctrain.util.text import format_bytes, unit_of_bytes, without_math

COLOURS = dict(
    zip(CATEGORIES, ("#1f5fbf", "#3b8f54", "#d9a31e", "#7b4fa6", "#8a8a8a", "#c9c9c9", "#e8c9a8", "#a8c4c4"))
)
_LIMIT = "#c0392b"
_ROW, _BAR = 0.36, 0.78  # inches per row; share of a row that its bar takes


def memory_figure(title: str, found: Sequence[Configuration]) -> Any:
    """Return the chart as a matplotlib figure; raises ``UsageError`` if matplotlib is missing.

    On GPUs there are two panels, for a rank's device and for a node's memory; on CPUs one, for the
    node.
    """
    locations = ["host"] if found[0].run.device == "cpu" else ["device", "host"]
    drawn = new_figure(1.8 + 6.2 * len(locations), _ROW * len(found) + 1.9)
    axes = drawn.subplots(1, len(locations), squeeze=False, sharey=True)[0]
    for axis, location in zip(axes, locations):
        _panel(axis, location, found)
    axes[0].set_yticks(range(len(found)), [one.name for one in found], fontsize=9)
    for label, one in zip(axes[0].get_yticklabels(), found):
        label.set_fontweight("bold" if one.chosen else "normal")
    shown = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels())}
    labels = [label for label in (*CATEGORIES, "limit") if label in shown]
    handles = [shown[label] for label in labels]
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(CATEGORIES) + 1, frameon=False, fontsize=8)
    drawn.suptitle(without_math(title), x=0.01, ha="left", fontsize=11, color=INK)
    return drawn


def _panel(axis: Any, location: str, found: Sequence[Configuration]) -> None:
    limit = found[0].limits.device if location == "device" else found[0].limits.host
    parts = [one.memory.rank.device if location == "device" else one.memory.node.host for one in found]
    most = max([limit or 0, *(sum(each.values()) for each in parts)])
    unit, scale = unit_of_bytes(most)
    begins = [0.0] * len(found)
    for part in CATEGORIES:
        if not any(each[part] for each in parts):
            continue  # nothing to draw, and nothing to explain in the legend
        widths = [each[part] / scale for each in parts]
        axis.barh(range(len(found)), widths, _BAR, left=begins, color=COLOURS[part], label=part, zorder=2)
        begins = [begin + width for begin, width in zip(begins, widths)]
    for row, end in enumerate(begins):
        over = limit is not None and end * scale > limit
        colour, behind = _LIMIT if over else INK, {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        text = (format_bytes(end * scale, 2), (end, row))
        axis.annotate(
            *text, (5, 0), textcoords="offset points", va="center", fontsize=8, color=colour, bbox=behind, zorder=4
        )
    if limit is not None:
        axis.axvline(limit / scale, color=_LIMIT, linewidth=1.4, linestyle="--", label="limit", zorder=3)
    axis.set_xlim(0, most / scale * 1.17)
    axis.set_ylim(len(found) - 0.4, -0.6)
    where = "the fullest rank, on its device" if location == "device" else "the fullest node, all ranks"
    axis.set_xlabel(f"{unit} ({where})")
    add_grid(axis, "x", color="#dddddd", linewidth=0.6)


# Plot of a scaling curve: samples per second over ranks, compared with linear scaling ---------------------------------


CURVES = {"strong": ("same batch", "#3b6fb6", "o"), "weak": ("same samples per rank", "#5fa55a", "s")}
_IDEAL = "#b8b8b8"


def draw(curve: Curve, run: PlannedRun, path: str | Path) -> None:
    """Plot a curve into a file, in the format of its suffix; raises ``UsageError`` if that is not possible."""
    path = Path(path)
    check_suffix(path)
    save_figure(scaling_figure(curve, run), path)


def scaling_figure(curve: Curve, run: PlannedRun) -> Any:
    """Return the plot as a matplotlib figure; raises ``UsageError`` if matplotlib is missing."""
    found = new_figure(9.5, 4.2)
    rates, shares = found.subplots(1, 2, width_ratios=(3, 2))
    for kind in CURVES:
        _draw_curve(rates, shares, curve, kind, run.ranks)
    highest = max(curve.efficiency(point, kind) or 0.0 for point in curve.points for kind in CURVES)
    rates.set_title(f"{without_math(run.facts.name)}, {_strategy(run)}: forecast", loc="left", fontsize=11, color=INK)
    rates.set(xscale="log", yscale="log", xlabel="ranks", ylabel="samples per second")
    shares.set(xscale="log", xlabel="ranks", ylabel="samples per second and GPU or core", ylim=(0, 1.08 * highest))
    shares.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for axis in (rates, shares):
        add_grid(axis)
    rates.legend(frameon=False, fontsize=9)
    return found


def _strategy(run: PlannedRun) -> str:
    degrees = {"pipe": run.parallel.pipe, "tensor": run.parallel.tensor}
    return ", ".join([run.parallel.data, *(f"{axis} {count}" for axis, count in degrees.items() if count > 1)])


def _draw_curve(rates: Any, shares: Any, curve: Curve, kind: str, chosen: int) -> None:
    label, colour, marker = CURVES[kind]
    points = [point for point in curve.points if getattr(point, kind) is not None]
    if not points:
        return
    ranks = [point.ranks for point in points]
    throughput = [getattr(point, kind).samples_per_second for point in points]
    if kind == "weak":
        best = max(rate / count for rate, count in zip(throughput, ranks))
        ideal = [best * count for count in ranks]
        rates.plot(ranks, ideal, color=_IDEAL, linewidth=1.2, linestyle="--", label="ideal", zorder=1)
    rates.plot(ranks, throughput, color=colour, marker=marker, markersize=4.5, label=label)
    shares.plot(ranks, [curve.efficiency(point, kind) for point in points], color=colour, marker=marker, markersize=4.5)
    if chosen in ranks:  # a ring around the planned run
        at = throughput[ranks.index(chosen)]
        rates.plot([chosen], [at], marker="o", markersize=11, markerfacecolor="none", color=colour)
