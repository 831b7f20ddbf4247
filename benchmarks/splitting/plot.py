"""Plot of a result: time of a step, compared with the ideal time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from splitting.names import ALONE, DTENSOR, OURS
from splitting.targets import ideal

BLUE, GREY, ORANGE = "#1f5fbf", "#9a9a9a", "#d9631e"  # hpctrain, the machine's own limits, torch
COLOURS = {ALONE: GREY, OURS: BLUE, DTENSOR: ORANGE}
LOOK: Any = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Plot a result next to its JSON, as PNG and SVG; return the files, an empty list without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(LOOK):
        figure, axes = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
        _bars(axes, result)
        axes.set_title(title(result), loc="left", fontsize=11, fontweight="bold")
        files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)
    return files


def _bars(axes: Any, result: dict[str, Any]) -> None:
    """Draw one bar per candidate, with a line between its quartiles."""
    times = {name: one for name, one in result["seconds"].items() if name in COLOURS}
    medians = [one["median"] * 1e3 for one in times.values()]
    axes.barh(range(len(times)), medians, color=[COLOURS[name] for name in times])
    for place, one in enumerate(times.values()):
        low, high = one["quartile_1"] * 1e3, one["quartile_3"] * 1e3
        axes.plot([low, high], [place, place], color="black", linewidth=1, zorder=3)
        axes.text(max(high, one["median"] * 1e3), place, f"  {one['median'] * 1e3:.0f}", va="center", fontsize=9)
    if ALONE in times:
        axes.axvline(ideal(result["seconds"], result["ranks"]) * 1e3, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(times)), list(times))
    axes.set_xlabel("ms per step, slowest rank (bar: median; line: quartiles; dashed: no loss)")
    axes.invert_yaxis()
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def title(result: dict[str, Any]) -> str:
    """Return a title that states the task."""
    task = result["task"]
    return f"{task['blocks']} MLP blocks of width {task['width']}, {task['tokens']} tokens, {result['ranks']} ranks"
