"""Bar chart of the memory that configurations need: one stacked bar per configuration, and the limit as a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.forecast.candidates import Candidate
from hpctrain.forecast.memory import PARTS
from hpctrain.forecast.sizes import tell
from hpctrain.util.text import without_math

KINDS = (".png", ".svg", ".pdf")
COLOURS = dict(zip(PARTS, ("#1f5fbf", "#3b8f54", "#d9a31e", "#7b4fa6", "#8a8a8a", "#c9c9c9", "#e8c9a8", "#a8c4c4")))
_INK, _LIMIT = "#333333", "#c0392b"
_ROW, _BAR = 0.36, 0.78  # inches per row; share of a row that its bar takes


def figure(title: str, found: Sequence[Candidate]) -> Any:
    """Return the chart as a matplotlib figure; raises ``UsageError`` if matplotlib is missing.

    On GPUs there are two panels, for a rank's device and for a node's memory; on CPUs one, for the
    node.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("drawing needs matplotlib: pip install 'hpctrain[plot]'") from error
    places = ["host"] if found[0].run.device == "cpu" else ["device", "host"]
    drawn = Figure(figsize=(1.8 + 6.2 * len(places), _ROW * len(found) + 1.9), layout="constrained")
    axes = drawn.subplots(1, len(places), squeeze=False, sharey=True)[0]
    for axis, place in zip(axes, places):
        _panel(axis, place, found)
    axes[0].set_yticks(range(len(found)), [one.name for one in found], fontsize=9)
    for label, one in zip(axes[0].get_yticklabels(), found):
        label.set_fontweight("bold" if one.chosen else "normal")
    handles, labels = axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(PARTS) + 1, frameon=False, fontsize=8)
    drawn.suptitle(without_math(title), x=0.01, ha="left", fontsize=11, color=_INK)
    return drawn


def _panel(axis: Any, place: str, found: Sequence[Candidate]) -> None:
    limit = found[0].limits.device if place == "device" else found[0].limits.host
    parts = [one.memory.rank.device if place == "device" else one.memory.node.host for one in found]
    most = max([limit or 0, *(sum(each.values()) for each in parts)])
    unit, scale = _unit(most)
    begins = [0.0] * len(found)
    for part in PARTS:
        widths = [each[part] / scale for each in parts]
        axis.barh(range(len(found)), widths, _BAR, left=begins, color=COLOURS[part], label=part, zorder=2)
        begins = [begin + width for begin, width in zip(begins, widths)]
    for row, end in enumerate(begins):
        over = limit is not None and end * scale > limit
        colour, behind = _LIMIT if over else _INK, {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        text = (f"{tell(end * scale)}", (end, row))
        axis.annotate(
            *text, (5, 0), textcoords="offset points", va="center", fontsize=8, color=colour, bbox=behind, zorder=4
        )
    if limit is not None:
        axis.axvline(limit / scale, color=_LIMIT, linewidth=1.4, linestyle="--", label="limit", zorder=3)
    axis.set_xlim(0, most / scale * 1.17)
    axis.set_ylim(len(found) - 0.4, -0.6)
    where = "the fullest rank, on its device" if place == "device" else "the fullest node, all ranks"
    axis.set_xlabel(f"{unit} ({where})")
    axis.grid(True, axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _unit(most: float) -> tuple[str, float]:
    name = tell(most).split()[1]
    return name, 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(name)
