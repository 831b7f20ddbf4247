"""Plots of a result: time of a step with its ideal, and timelines of two schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from piping.names import ALONE, OURS, TORCH

from hpctrain.parallel.pipeline.render import figure
from hpctrain.parallel.pipeline.timeline import Timeline

BLUE, GREY, ORANGE = "#1f5fbf", "#9a9a9a", "#d9631e"  # hpctrain, the machine's own limits, torch
LOOK: Any = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}


def draw(result: dict[str, Any], timelines: Mapping[str, Timeline], path: Path) -> list[Path]:
    """Plot a result next to its JSON, and timelines by name, as PNG and SVG; return [] without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(LOOK):
        bars, axes = pyplot.subplots(figsize=(8, 0.36 * len(result["seconds"]) + 1.1), layout="constrained")
        _bars(axes, result)
        axes.set_title(title(result), loc="left", fontsize=11, fontweight="bold")
        files = _save(bars, path)
        pyplot.close(bars)
        for name, timeline in timelines.items():
            words = name.replace("hpctrain ", "").replace("m=", "m = ")
            drawn = figure(_in_milliseconds(timeline), f"{words}, measured", unit="ms")
            files += _save(drawn, path.with_name(f"{path.name}-{words.split()[0]}"))
    return files


def _save(drawn: Any, path: Path) -> list[Path]:
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        drawn.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _bars(axes: Any, result: dict[str, Any]) -> None:
    """Draw one bar per candidate, with a line between its quartiles and a mark at its ideal."""
    times = result["seconds"]
    axes.barh(range(len(times)), [one["median"] * 1e3 for one in times.values()], color=list(map(_colour, times)))
    for place, (name, one) in enumerate(times.items()):
        low, high = one["quartile_1"] * 1e3, one["quartile_3"] * 1e3
        axes.plot([low, high], [place, place], color="black", linewidth=1, zorder=3)
        text = f"  {one['median'] * 1e3:.0f}"
        if name in result["schedules"]:
            best = result["schedules"][name]["ideal"] * 1e3
            axes.plot([best, best], [place - 0.4, place + 0.4], color="white", linewidth=3, zorder=4)
            axes.plot([best, best], [place - 0.4, place + 0.4], color="black", linewidth=1.2, zorder=5)
            text += f"   ({best:.0f} ideal)"
        axes.text(max(high, one["median"] * 1e3), place, text, va="center", fontsize=9)
    axes.set_yticks(range(len(times)), list(times))
    axes.set_xlabel("ms per step, slowest rank (bar: median; line: quartiles; upright mark: ideal)")
    axes.margins(x=0.16)
    axes.invert_yaxis()
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


def _colour(name: str) -> str:
    return {ALONE: GREY, **dict.fromkeys(OURS, BLUE), **dict.fromkeys(TORCH, ORANGE)}[name]


def _in_milliseconds(timeline: Timeline) -> Timeline:
    return Timeline(
        tuple(
            tuple(replace(span, start=span.start * 1e3, end=span.end * 1e3) for span in row) for row in timeline.rows
        )
    )


def title(result: dict[str, Any]) -> str:
    """Return a title that states the task."""
    task = result["task"]
    return (
        f"GPT of {task['layers']} layers, width {task['width']}, on {result['ranks']} ranks, "
        f"microbatches of {task['context']} tokens"
    )
