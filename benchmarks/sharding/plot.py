"""Plots of a result: time of steps, and memory of the node by kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharding.names import ALONE, KINDS, REST

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, GREY, ORANGE = "#1f5fbf", "#9a9a9a", "#d9631e"  # hpctrain, the machine's own limits, torch
COLOURS = dict(zip((*KINDS, REST), ("#1f5fbf", "#3b8f54", "#d9a31e", "#7b4fa6", "#c9c9c9")))
LOOK: Any = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
MB = 10**6


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Plot a result next to its JSON, as PNG and SVG; return the files, an empty list without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: list[Callable[[Axes, dict[str, Any]], None]] = [_times, *([_memory] if result["memory"] else [])]
    with matplotlib.rc_context(LOOK):
        size = (6.5 * len(panels), 4.4)
        figure, grid = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
        for axes, panel in zip(grid[0], panels):
            panel(axes, result)
            axes.invert_yaxis()
            axes.grid(True, axis="x", color="#dddddd", linewidth=0.6, zorder=0)
            axes.set_axisbelow(True)
        figure.suptitle(_title(result), fontsize=13, fontweight="bold")
        files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)
    return files


def _times(axes: Axes, result: dict[str, Any]) -> None:
    """Draw one bar per candidate, with a line between its quartiles."""
    times = result["seconds"]
    axes.barh(range(len(times)), [one["median"] * 1e3 for one in times.values()], color=list(map(_colour, times)))
    for place, one in enumerate(times.values()):
        low, high = one["quartile_1"] * 1e3, one["quartile_3"] * 1e3
        axes.plot([low, high], [place, place], color="black", linewidth=1, zorder=3)
        axes.text(max(high, one["median"] * 1e3), place, f"  {one['median'] * 1e3:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(times)), list(times))
    axes.set_xlabel("ms (bar: median; line: quartiles)")
    axes.set_title("A step, on the slowest rank", loc="left", fontsize=11)


def _memory(axes: Axes, result: dict[str, Any]) -> None:
    """Draw stacked bars of the node's memory by kind, at its peak."""
    nodes = {name: one["node"] for name, one in result["memory"].items()}
    begins = [0.0] * len(nodes)
    for kind, colour in COLOURS.items():
        widths = [max(node[kind], 0) / MB for node in nodes.values()]
        axes.barh(range(len(nodes)), widths, left=begins, color=colour, label=kind)
        begins = [begin + width for begin, width in zip(begins, widths)]
    for place, (begin, node) in enumerate(zip(begins, nodes.values())):
        axes.text(begin, place, f"  {node['total'] / MB:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(nodes)), list(nodes))
    axes.set_xlabel(f"MB ({result['ranks']} ranks together, beyond their memory before)")
    axes.set_title("Memory of the node at its peak", loc="left", fontsize=11)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.3, -0.14))


def _colour(name: str) -> str:
    return GREY if name == ALONE else BLUE if name.startswith("hpctrain") else ORANGE


def _title(result: dict[str, Any]) -> str:
    numbers = f"{result['parameters'] / 1e6:.1f} million parameters, {result['ranks']} ranks"
    return f"Training a GPT of {numbers}, {result['batch_per_rank']} x {result['context']} tokens each"
