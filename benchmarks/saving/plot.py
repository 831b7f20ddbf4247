"""Plots of a result: rates of saving and loading, and measured figures relative to their targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comm.sizes import size_text
from saving.names import CRC, OURS, RAW, RAW_ONE, RAW_READ

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, GREY, ORANGE = "#1f5fbf", "#9a9a9a", "#d9631e"  # hpctrain, the machine's own limits, torch
GREEN, RED = "#3b8f54", "#b0413e"
MOST = 2.0  # multiple of the target at which bars are cut off, so that short ones stay visible
LOOK: Any = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
TITLES = {
    "write": "Saving: bytes / time until all ranks are done",
    "read": "Loading: bytes per rank / time (page cache warm)",
}


Panel = tuple[Callable[["Axes", str, Sequence[dict[str, Any]]], None], str, Sequence[dict[str, Any]]]


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Plot a result next to its JSON, as PNG and SVG; return the files, an empty list without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {kind: [row for row in result["rows"] if row["kind"] == kind] for kind in TITLES}
    panels: list[Panel] = [(_bars, title, rows[kind]) for kind, title in TITLES.items() if rows[kind]]
    if result["targets"]:
        panels.append((_reached, "Measured figures relative to their targets", result["targets"]))
    if not panels:
        return []
    with matplotlib.rc_context(LOOK):
        size = (6 * len(panels), 4.4)
        figure, grid = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
        for axes, (drawn, title, content) in zip(grid[0], panels):
            drawn(axes, title, content)
        figure.suptitle(_title(result), fontsize=13, fontweight="bold")
        files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)
    return files


def _bars(axes: Axes, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw one bar per candidate, the first on top, with a line from its slowest turn to its fastest."""
    places = range(len(rows))
    rates = [row["rate"] for row in rows]
    axes.barh(places, rates, color=[_colour(row["candidate"]) for row in rows], height=0.66, zorder=2)
    for place, row in zip(places, rows):
        ends = [row["size"] / row[end] / 1e9 for end in ("max", "min")]
        axes.plot(ends, [place, place], color="black", linewidth=1, zorder=3)
        axes.text(max(*ends, row["rate"]), place, f"  {row['rate']:.2f}", va="center", fontsize=9)
    axes.set_yticks(places, [row["candidate"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(row["size"] / row["min"] / 1e9 for row in rows))
    axes.set_xlabel("GB/s (bar: median; line: slowest to fastest turn)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def _reached(axes: Axes, title: str, targets: Sequence[dict[str, Any]]) -> None:
    """Draw the measured figures relative to their targets; bars beyond the line have reached them."""
    shares = [min(share_reached(target), MOST) for target in targets]
    places = range(len(targets))
    axes.barh(places, shares, color=[GREEN if target["met"] else RED for target in targets], height=0.66, zorder=2)
    for place, (target, share) in enumerate(zip(targets, shares)):
        value = target["value"]
        text = f"  {value:,}" if isinstance(value, int) else f"  {value:.2f}"
        axes.text(max(share, 1), place, f"{text} ({target['wanted']})", va="center", fontsize=9)
    axes.axvline(1, color="black", linewidth=1, zorder=3)
    axes.set_yticks(places, [target["what"].replace(": ", ":\n", 1) for target in targets], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * MOST)
    axes.set_xticks([0, 1, MOST])
    axes.set_xlabel(f"share of the target, at most {MOST:g}")
    axes.set_title(title, loc="left", fontsize=11)


def share_reached(target: dict[str, Any]) -> float:
    """Return the degree to which a target is reached: 1 if just reached, more if exceeded."""
    bound, value = float(target["wanted"].split()[1]), float(target["value"])
    if target["wanted"].startswith(">="):
        return value / bound
    return bound / value if value else float("inf") if bound else 1.0


def _colour(name: str) -> str:
    if name in (RAW, RAW_ONE, RAW_READ, CRC):
        return GREY
    return BLUE if name.startswith(OURS) else ORANGE


def _title(result: dict[str, Any]) -> str:
    size = size_text(result["size"])
    return f"A checkpoint of {size} on {result['ranks']} ranks, {result['filesystem']}, {result['mpi']}"
