"""Plot of a result: one line per candidate over the size, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comm.names import COPY, GLOO, LIBRARY, NCCL, ORDER, OURS, OUTSIDE, PIECES
from comm.sizes import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# hpctrain in blue and thick, the library in orange, torch.distributed in green; named algorithms
# get the other colours.
STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#1f5fbf", "linewidth": 2.6, "marker": "o", "zorder": 5},
    OUTSIDE: {"color": "#6ba3e8", "linewidth": 1.8, "marker": "o", "markerfacecolor": "white", "zorder": 4},
    LIBRARY: {"color": "#d9631e", "linewidth": 1.8, "marker": "s"},
    PIECES: {"color": "#d9631e", "linewidth": 1.4, "marker": "s", "linestyle": "--", "markerfacecolor": "white"},
    GLOO: {"color": "#3b8f54", "linewidth": 1.8, "marker": "^"},
    NCCL: {"color": "#3b8f54", "linewidth": 1.8, "marker": "^"},
}
OTHERS = ("#7b4fa6", "#b0508c", "#8a6d3b", "#4f8f9b", "#555555")
LOOK: Any = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
GRID: dict[str, Any] = {"color": "#dddddd", "linewidth": 0.6}
TITLES = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "broadcast": "broadcast",
    "pingpong": "send and receive",
    "overlap": "all_reduce behind compute",
}


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Plot a result next to its JSON, as PNG and SVG; return the files, an empty list without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(LOOK):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.5, 4.8), layout="constrained")
        panels = _overlap_panels() if result["benchmark"] == "overlap" else _panels(result["benchmark"])
        for axes, (title, label, value, log) in zip((left, right), panels):
            _panel(axes, result["rows"], title, label, value, log)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
        figure.suptitle(_title(result), fontsize=13, fontweight="bold")
        files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)
    return files


Value = Callable[[dict[str, Any]], float]
Panel = tuple[str, str, Value, bool]  # title, unit, plotted value, logarithmic axis


def _panels(operation: str) -> Sequence[Panel]:
    half = "half round trip, " if operation == "pingpong" else ""
    return (
        (f"Latency ({half}median of the slowest rank)", "microseconds", lambda row: row["median"] * 1e6, True),
        ("Bus bandwidth", "GB/s", lambda row: row["busbw"], True),
    )


def _overlap_panels() -> Sequence[Panel]:
    return (
        ("Reduction and compute together", "microseconds", lambda row: row["median"] * 1e6, True),
        ("Reduction hidden behind compute", "percent", lambda row: row["overlap"], False),
    )


def _panel(
    axes: Axes, rows: Sequence[dict[str, Any]], title: str, label: str, value: Value, log: bool
) -> None:
    rows = [row for row in rows if row["candidate"] != COPY]
    found = dict.fromkeys(row["candidate"] for row in rows)
    names = sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else -1)
    spare = [name for name in names if name not in STYLES]
    for name in names:
        style = STYLES.get(name) or {"color": OTHERS[spare.index(name) % len(OTHERS)], "linewidth": 1.4, "marker": "D"}
        own = sorted((row["size"], value(row)) for row in rows if row["candidate"] == name)
        axes.plot(*zip(*own), label=name, markersize=5.5, **style)
    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(-3, 103)
    _ticks(axes, sorted({row["size"] for row in rows}))
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("size of the whole tensor")
    axes.set_ylabel(label)
    axes.grid(True, which="major", **GRID)
    axes.set_axisbelow(True)


def _ticks(axes: Axes, sizes: Sequence[int]) -> None:
    """Label the measured sizes, as far as their labels fit."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    step = -(-len(sizes) // 9)
    axes.set_xticks(sizes[::-1][::step], [size_text(size) for size in sizes[::-1][::step]], rotation=35, ha="right")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9f}".rstrip("0").rstrip(".")))


def _title(result: dict[str, Any]) -> str:
    nodes = f" on {result['nodes']} nodes" if result["nodes"] > 1 else ""
    return f"{TITLES[result['benchmark']]}, {result['ranks']} ranks{nodes}, {result['dtype']}, {result['mpi']}"
