"""Plots of the results: rates of optimizer steps, and the concurrent work of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offloading.names import ALONE, OURS, OURS_16, TORCH, TORCH_16, TRIAD
from offloading.targets import count

BLUE, GREY, ORANGE = "#1f5fbf", "#9a9a9a", "#d9631e"  # hpctrain, the machine's own limits, torch
COLOURS = {OURS: BLUE, TORCH: ORANGE, OURS_16: BLUE, TORCH_16: ORANGE, ALONE: "#eeb48f"}
STREAMS = {"kernels": GREY, "down": BLUE, "up": "#6fa0e0", "update": ORANGE}
LOOK: Any = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}

Timeline = Sequence[tuple[str, float, float]]  # kind of work, start and duration in seconds


def draw_update(result: Mapping[str, Any], path: Path) -> list[Path]:
    """Plot the rates of optimizer steps next to their JSON, as PNG and SVG; return the files."""

    def draw(figure: Any) -> None:
        panels = result["seconds"]
        for axes, threads in zip(figure.subplots(1, len(panels), sharex=True, squeeze=False)[0], panels):
            _rates(axes, result["rates"][threads], first=axes.get_subplotspec().is_first_col())
            axes.set_title(count(threads), loc="left")
        figure.suptitle(title(result), x=0.01, ha="left", fontsize=11, fontweight="bold")

    return _save(path, (11, 3), draw)


def _rates(axes: Any, rates: Mapping[str, float], *, first: bool) -> None:
    """Draw one bar per candidate, and a line at the memory's streaming rate."""
    names = [name for name in rates if name in COLOURS]
    axes.barh(range(len(names)), [rates[name] / 1e9 for name in names], color=[COLOURS[name] for name in names])
    for place, name in enumerate(names):
        axes.text(rates[name] / 1e9, place, f" {rates[name] / 1e9:.1f}", va="center", fontsize=9)
    axes.axvline(rates[TRIAD] / 1e9, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(names)), names if first else [""] * len(names))
    axes.set_xlabel(f"GB/s at 28 B per parameter (dashed: {TRIAD})")
    axes.invert_yaxis()
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_streams(name: str, timeline: Timeline, path: Path) -> list[Path]:
    """Plot the work of the device, of its link in both directions and of the host's optimizer in a step."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for row, what in enumerate(STREAMS):
            bars = [(begin * 1e3, length * 1e3) for which, begin, length in timeline if which == what]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=STREAMS[what])
        axes.set_yticks(range(len(STREAMS)), list(STREAMS))
        axes.invert_yaxis()
        axes.set_xlabel("ms since the start of the step")
        axes.set_title(name, loc="left", fontsize=11, fontweight="bold")

    return _save(path, (11, 2.4), draw)


def title(result: Mapping[str, Any]) -> str:
    """Return a title that states the task."""
    return f"AdamW on {result['parameters'] / 1e6:.1f} million float32 parameters, clipped, with a copy in bfloat16"


def _save(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> list[Path]:
    """Draw a figure, and save it as PNG and SVG; return the files, an empty list without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(LOOK):
        figure = pyplot.figure(figsize=size, layout="constrained")
        draw(figure)
        files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)
    return files
