"""Pictures of results: bars with their spread, and files as PNG and SVG; without matplotlib, none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.util.plotting import add_grid, new_figure

BLUE, GREY, ORANGE = "#1f5fbf", "#9a9a9a", "#d9631e"  # hpctrain, the machine's own limits, torch
GREEN, RED = "#3b8f54", "#b0413e"
GRID: Any = {"color": "#dddddd", "linewidth": 0.6}
LOOK: Any = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}


@dataclass(frozen=True)
class Bar:
    """Bar of a candidate: its value, the ends of its spread, and the text next to it."""

    name: str
    value: float
    text: str
    colour: str
    ends: tuple[float, float] | None = None


def colour_of(name: str, own: Sequence[str] = ()) -> str:
    """Return the colour of a candidate: hpctrain's, one of the machine's ``own`` limits, or that of others."""
    return GREY if name in own else BLUE if name.startswith("hpctrain") else ORANGE


def save(path: Path, size: tuple[float, float], fill: Callable[[Any], object]) -> list[Path]:
    """Draw a figure of a size in inches next to its JSON, as PNG and SVG; return the files."""

    def make() -> Any:
        figure = new_figure(*size)
        fill(figure)
        return figure

    return save_figure(make, path)


def save_figure(make: Callable[[], Any], path: Path) -> list[Path]:
    """Make a figure in the common style, and write it as PNG and SVG; return the files."""
    try:
        import matplotlib
    except ImportError:
        return []
    with matplotlib.rc_context(LOOK):
        figure = make()
        files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def bars(axes: Any, rows: Sequence[Bar], label: str, title: str = "") -> None:
    """Draw horizontal bars, the first on top, each with a line between the ends of its spread."""
    places = range(len(rows))
    axes.barh(places, [one.value for one in rows], color=[one.colour for one in rows], height=0.7, zorder=2)
    for place, one in zip(places, rows):
        if one.ends:
            axes.plot(one.ends, [place, place], color="black", linewidth=1, zorder=3)
        axes.text(max((one.value, *(one.ends or ()))), place, f"  {one.text}", va="center", fontsize=9)
    axes.set_yticks(places, [one.name for one in rows])
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel(label)
    axes.set_title(title, loc="left", fontsize=11)
    add_grid(axes, "x", **GRID)


def step_bars(times: Mapping[str, Mapping[str, float]], own: Sequence[str] = ()) -> list[Bar]:
    """Return a bar per candidate: the median of its steps in milliseconds, with its quartiles."""
    found: list[Bar] = []
    for name, time in times.items():
        low, median, high = (time[key] * 1e3 for key in ("quartile_1", "median", "quartile_3"))
        found.append(Bar(name, median, f"{median:.0f}", colour_of(name, own), (low, high)))
    return found
