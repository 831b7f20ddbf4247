"""Plot of a scaling curve: samples per second over ranks, compared with linear scaling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.forecast.run import PlannedRun
from hpctrain.forecast.scaling import Curve, Point
from hpctrain.forecast.time_step import StepTime
from hpctrain.util import atomic
from hpctrain.util.text import without_math

KINDS = (".png", ".svg", ".pdf")
WAYS = {"strong": ("same batch", "#3b6fb6", "o"), "weak": ("same samples per rank", "#5fa55a", "s")}
_INK, _IDEAL = "#333333", "#b8b8b8"


def draw(curve: Curve, run: PlannedRun, path: str | Path) -> None:
    """Plot a curve into a file, in the format of its suffix; raises ``UsageError`` if that is not possible."""
    path = Path(path)
    if path.suffix not in KINDS:
        raise UsageError(f"cannot draw {path}: a picture's name ends in {', '.join(KINDS)}")
    picture = figure(curve, run)
    try:
        with atomic.replacing(path) as out:
            picture.savefig(out, format=path.suffix[1:], dpi=150)
    except OSError as error:
        raise UsageError(f"cannot draw {path}: {error.strerror}") from error


def figure(curve: Curve, run: PlannedRun) -> Any:
    """Return the plot as a matplotlib figure; raises ``UsageError`` if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("drawing needs matplotlib: pip install 'hpctrain[plot]'") from error
    found = Figure(figsize=(9.5, 4.2), layout="constrained")
    rates, shares = found.subplots(1, 2, width_ratios=(3, 2))
    for way in WAYS:
        _draw_way(rates, shares, curve, way, run.ranks)
    highest = max(curve.efficiency(point, way) or 0.0 for point in curve.points for way in WAYS)
    rates.set_title(f"{without_math(run.facts.name)}, {_strategy(run)}: forecast", loc="left", fontsize=11, color=_INK)
    rates.set(xscale="log", yscale="log", xlabel="ranks", ylabel="samples per second")
    shares.set(xscale="log", xlabel="ranks", ylabel="samples per second and GPU or core", ylim=(0, 1.08 * highest))
    shares.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for axis in (rates, shares):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, color="#ececec", linewidth=0.8)
        axis.set_axisbelow(True)
    rates.legend(frameon=False, fontsize=9)
    return found


def _strategy(run: PlannedRun) -> str:
    degrees = {"pipe": run.parallel.pipe, "tensor": run.parallel.tensor}
    return ", ".join([run.parallel.data, *(f"{axis} {count}" for axis, count in degrees.items() if count > 1)])


def _draw_way(rates: Any, shares: Any, curve: Curve, way: str, chosen: int) -> None:
    label, colour, marker = WAYS[way]
    points = [point for point in curve.points if getattr(point, way) is not None]
    if not points:
        return
    ranks = [point.ranks for point in points]
    throughput = [_rate(point, way) for point in points]
    if way == "weak":
        best = max(rate / count for rate, count in zip(throughput, ranks))
        ideal = [best * count for count in ranks]
        rates.plot(ranks, ideal, color=_IDEAL, linewidth=1.2, linestyle="--", label="ideal", zorder=1)
    rates.plot(ranks, throughput, color=colour, marker=marker, markersize=4.5, label=label)
    shares.plot(ranks, [curve.efficiency(point, way) for point in points], color=colour, marker=marker, markersize=4.5)
    _mark(rates, ranks, throughput, chosen, colour)


def _mark(axis: Any, ranks: Sequence[int], values: Sequence[float], chosen: int, colour: str) -> None:
    """Draw a ring around the planned run."""
    if chosen in ranks:
        at = ranks.index(chosen)
        axis.plot([chosen], [values[at]], marker="o", markersize=11, markerfacecolor="none", color=colour)


def _rate(point: Point, way: str) -> float:
    step: StepTime = getattr(point, way)
    return step.samples / step.seconds
