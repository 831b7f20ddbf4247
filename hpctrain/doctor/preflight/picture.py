"""Plot of a report: bandwidth map of all pairs, and each rank's rates relative to the usual ones."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high
from typing import Any

from hpctrain.doctor.preflight.rates import LEAST
from hpctrain.doctor.preflight.report import PreflightReport
from hpctrain.errors import UsageError
from hpctrain.util.text import without_math

_INK, _SLOW = "#333333", "#c0392b"
_COLOURS = {"products": "#1f5fbf", "memory": "#3b8f54", "writes": "#d9a31e"}
_LABELS = 40  # maximum number of tick labels
_NUMBERS = 10  # maximum number of members for which cells show their values


def figure(report: PreflightReport, title: str) -> Any:
    """Return the plot as a matplotlib figure; raises ``UsageError`` if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("drawing needs matplotlib: pip install 'hpctrain[plot]'", everywhere=True) from error
    drawn = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(1, 1.1))
    _map(drawn, left, report)
    _shares(right, report)
    drawn.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK)
    return drawn


def _map(drawn: Any, axis: Any, report: PreflightReport) -> None:
    """Draw bandwidths as a map; pairs that were not measured stay white."""
    nodes = len(report.hosts) > 1
    names = report.hosts if nodes else [str(seat.rank) for seat in report.seats]
    pairs = report.between.pairs if nodes else report.inside[0].pairs
    field = [[float("nan")] * len(names) for _ in names]
    for pair in pairs:
        field[pair.first][pair.second] = field[pair.second][pair.first] = pair.bandwidth / 1e9
    axis.set_title(f"messages between {'nodes' if nodes else 'ranks'}, GB/s", fontsize=10, color=_INK)
    if not pairs:
        axis.text(0.5, 0.5, "there are no two", ha="center", transform=axis.transAxes, color=_INK)
        axis.set_axis_off()
        return
    most = max(pair.bandwidth for pair in pairs) / 1e9
    drawn.colorbar(axis.imshow(field, cmap="viridis", vmin=0, vmax=most), ax=axis, shrink=0.85)
    _name(axis, names)
    if len(names) <= _NUMBERS:
        for row, values in enumerate(field):
            for column, value in enumerate(values):
                if value == value:
                    colour = "white" if value < 0.6 * most else _INK
                    axis.text(column, row, f"{value:.3g}", ha="center", va="center", fontsize=8, color=colour)


def _name(axis: Any, names: Sequence[str]) -> None:
    every = max(1, -(-len(names) // _LABELS))
    places = range(0, len(names), every)
    axis.set_xticks(places, [without_math(names[place]) for place in places], rotation=90, fontsize=8)
    axis.set_yticks(places, [without_math(names[place]) for place in places], fontsize=8)


def _shares(axis: Any, report: PreflightReport) -> None:
    """Draw each rank's rates relative to the usual ones, and the threshold of a slow rank."""
    rates = {"products": report.products, "memory": report.streams, "writes": [one.rate for one in report.written]}
    ranks = range(len(report.seats))
    for (label, values), marker in zip(rates.items(), "osD"):
        usual = median_high(values) or 1.0
        axis.plot(ranks, [value / usual for value in values], marker, color=_COLOURS[label], label=label, markersize=5)
    axis.axhline(1 - LEAST, color=_SLOW, linewidth=1.2, linestyle="--", label="slow below (not for writes)")
    axis.set_ylim(0, None)
    axis.set_title("each rank relative to the median", fontsize=10, color=_INK)
    axis.set_xlabel("rank")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    axis.legend(frameon=False, fontsize=8, loc="lower left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
