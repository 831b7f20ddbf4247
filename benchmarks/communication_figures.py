"""Rows, ratios, targets, tables and pictures of the communication benchmarks.

Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md), in GB/s of 10^9 bytes. The size S is
that of the whole tensor: the input of every rank of a reduction, or the output of a gather. The
algorithm bandwidth is S / t. The bus bandwidth multiplies it by the minimum number of bytes that
the operation must move per byte of the tensor. It can therefore be compared with the speed of a
link, whatever the number of ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from communication_candidates import ORDER, PEERS, STREAM_SIZE, Name
from harness.plot import GRID, save
from harness.report import Target, at_least, table
from harness.stats import summary

from hpctrain.util.plotting import add_grid
from hpctrain.util.text import format_bytes

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "pingpong": lambda ranks: 1.0,
}


Row = dict[str, Any]  # of the table: seconds per call on the slowest rank, and bandwidths in GB/s from the median
Figures = dict[tuple[int, str], Row]


def row_of(
    operation: str, name: str, nbytes: int, seconds: Sequence[float], *, ranks: int, size: int, calls: int
) -> Row:
    """Return the row of a candidate's repeats of several calls. The time of a ping-pong is half of its round trip.

    ``size`` is that of the whole tensor in the requested dtype, ``nbytes`` that of this candidate's
    tensor, which may have another dtype.
    """
    times = [value / 2 for value in seconds] if operation == "pingpong" else list(seconds)
    found = summary(times)
    algbw = nbytes / found["median"] / 1e9
    return {
        "candidate": name,
        "size": size,
        "bytes": nbytes,
        **found,
        "p95": float(np.percentile(times, 95)),
        "algbw": algbw,
        "busbw": algbw * FACTORS[operation](ranks),
        "calls": calls,
    }


def by_size_and_name(rows: Iterable[Row]) -> Figures:
    return {(row["size"], row["candidate"]): row for row in rows}


def sizes_of(figures: Figures) -> list[int]:
    return sorted({size for size, _ in figures})


def names_of(figures: Figures) -> list[str]:
    """Return the candidates: hpctrain's in order of appearance, then the others."""
    found = dict.fromkeys(name for _, name in figures)
    return [name for name in found if name not in ORDER] + [name for name in ORDER if name in found]


def speedup(figures: Figures, size: int, name: str, against: str) -> float | None:
    """Return how many times faster a candidate is than another, by medians; None if one of them is missing."""
    own, other = figures.get((size, name)), figures.get((size, against))
    return float(other["median"] / own["median"]) if own and other else None


# Targets --------------------------------------------------------------------------------------------------------------

MEAN_SIZES = tuple(size * 2**10 for size in (64, 1024, 4096, 25600, 65536))
MEAN_TARGET = 4.0  # times faster than the library, two ranks
GLOO_SIZE, GLOO_TARGET = 25 * 2**20, 15.0
LARGE, LARGE_TARGET = 2**20, 3.0  # from this number of bytes up, times faster than the library
SLACK, PYTHON = 0.05, 3e-6  # allowed excess of auto over the library, relative and in seconds
STREAM_TARGET = 0.9  # at STREAM_SIZE


def targets(operation: str, ranks: int, figures: Figures, twin: str) -> Iterator[Target]:
    """Yield the targets for which the run has figures; ``twin`` is hpctrain with the other of two dtypes."""
    if operation == "all_reduce" and ranks == 2:
        yield from _mean(figures)
        yield from at_least("times gloo at 25 MiB", speedup(figures, GLOO_SIZE, Name.OURS, Name.GLOO), GLOO_TARGET)
    if operation == "all_reduce" and ranks > 2 or operation in ("reduce_scatter", "all_gather", "broadcast"):
        yield from _large(figures, Name.OURS)
    if operation == "all_gather":
        yield from _large(figures, Name.COMMON)
    if operation != "pingpong":
        yield from _never_slower(figures, Name.OURS)
        yield from _never_slower(figures, Name.OUTSIDE)
    if operation == "all_reduce":
        # A copy has the same memory traffic: 2 S / time over 2 S / time of the copy.
        rate = speedup(figures, STREAM_SIZE, Name.OURS, Name.COPY)
        yield from at_least("2 S / (time x streaming rate) at 64 MiB", rate, STREAM_TARGET)
        yield from _twin(figures, twin)


def _mean(figures: Figures) -> Iterator[Target]:
    """Compare with the library's one call, and with the better of that and messages of 16 MiB."""
    for what, others in (
        ("one call", (Name.LIBRARY,)),
        ("the better of one call and 16 MiB messages", (Name.LIBRARY, Name.MESSAGES)),
    ):
        ratios = []
        for size in MEAN_SIZES:
            found = [value for name in others if (value := speedup(figures, size, Name.OURS, name)) is not None]
            if not found:
                return
            ratios.append(min(found))
        mean = statistics.geometric_mean(ratios)
        yield Target(f"times the library ({what}), mean of 64K,1M,4M,25M,64M", mean, MEAN_TARGET)


def _least(
    figures: Figures, what: str, target: float, figure: Callable[[int], float | None], from_size: int = 0
) -> Iterator[Target]:
    """Yield the least figure of all sizes, if there are any."""
    sizes = [size for size in sizes_of(figures) if size >= from_size]
    found = [(value, size) for size in sizes if (value := figure(size)) is not None]
    if found:
        value, size = min(found)
        yield Target(f"{what}, least (at {format_bytes(size)})", value, target)


def _large(figures: Figures, name: str) -> Iterator[Target]:
    what = f"{name}: times the library from 1 MiB up"
    yield from _least(figures, what, LARGE_TARGET, lambda size: speedup(figures, size, name, Name.LIBRARY), LARGE)


def _never_slower(figures: Figures, name: str) -> Iterator[Target]:
    """Compare with the allowed time: that of the library's own call and the slack."""

    def relative(size: int) -> float | None:
        own, other = figures.get((size, name)), figures.get((size, Name.LIBRARY))
        return float((other["median"] * (1 + SLACK) + PYTHON) / own["median"]) if own and other else None

    yield from _least(figures, f"(library + 5 % + 3 us) / {name}", 1.0, relative)


def _twin(figures: Figures, twin: str) -> Iterator[Target]:
    """Compare bfloat16 with float32 of equally many elements, whichever of them the run measured."""
    halves = (twin, Name.OURS) if twin.endswith("bfloat16") else (Name.OURS, twin)
    what = "float32 / bfloat16 of as many elements"
    yield from _least(figures, what, 1.0, lambda size: speedup(figures, size, *halves))


# Output ---------------------------------------------------------------------------------------------------------------


def ratio_tables(figures: Figures) -> Iterator[str]:
    """Yield how many times faster hpctrain is than each of the others, by medians."""
    peers = [name for name in names_of(figures) if name in PEERS]
    own = [name for name in (Name.OURS, Name.OUTSIDE) if name in names_of(figures)]
    rows = [["size", *(f"{name} vs {peer}" for name in own for peer in peers)]]
    for size in sizes_of(figures):
        values = [speedup(figures, size, name, peer) for name in own for peer in peers]
        rows.append([format_bytes(size), *("" if value is None else f"{value:.2f}" for value in values)])
    if peers:
        yield f"times as fast (medians)\n{table(rows)}\n"


def row_table(figures: Figures) -> str:
    """Return the table: latencies in microseconds of the slowest rank, bandwidths in GB/s."""
    rows = [
        [
            "size",
            "candidate",
            "min us",
            "median us",
            "mean us",
            "p95 us",
            "algbw GB/s",
            "busbw GB/s",
            "repeats",
            "calls",
        ]
    ]
    for size in sizes_of(figures):
        for row in (figures[size, name] for name in names_of(figures) if (size, name) in figures):
            times = [f"{row[key] * 1e6:.2f}" for key in ("min", "median", "mean", "p95")]
            speeds = [f"{row[key]:.3f}" for key in ("algbw", "busbw")]
            rows.append([format_bytes(size), row["candidate"], *times, *speeds, str(row["repeats"]), str(row["calls"])])
    return table(rows, left=2)


def ratios_json(figures: Figures) -> dict[str, dict[str, float]]:
    """Return hpctrain's ratio to each of the others, by name and size."""
    found: dict[str, dict[str, float]] = {}
    for peer in names_of(figures):
        if peer in PEERS:
            values = {str(size): speedup(figures, size, Name.OURS, peer) for size in sizes_of(figures)}
            found[peer] = {size: value for size, value in values.items() if value is not None}
    return found


# hpctrain in blue and thick, the library in orange, torch.distributed in green; named algorithms
# get the other colours.
STYLES: dict[str, dict[str, Any]] = {
    Name.OURS: {"color": "#1f5fbf", "linewidth": 2.6, "marker": "o", "zorder": 5},
    Name.OUTSIDE: {"color": "#6ba3e8", "linewidth": 1.8, "marker": "o", "markerfacecolor": "white", "zorder": 4},
    Name.LIBRARY: {"color": "#d9631e", "linewidth": 1.8, "marker": "s"},
    Name.MESSAGES: {"color": "#d9631e", "linewidth": 1.4, "marker": "s", "linestyle": "--", "markerfacecolor": "white"},
    Name.GLOO: {"color": "#3b8f54", "linewidth": 1.8, "marker": "^"},
    Name.NCCL: {"color": "#3b8f54", "linewidth": 1.8, "marker": "^"},
}
OTHERS = ("#7b4fa6", "#b0508c", "#8a6d3b", "#4f8f9b", "#555555")
Value = Callable[[dict[str, Any]], float]
Panel = tuple[str, str, Value, bool]  # title, unit, plotted value, logarithmic axis
OVERLAP_PANELS: Sequence[Panel] = (
    ("Reduction and compute together", "microseconds", lambda row: row["median"] * 1e6, True),
    ("Reduction hidden behind compute", "percent", lambda row: row["overlap"], False),
)
TITLES = {"pingpong": "send and receive", "overlap": "all_reduce behind compute"}  # others: the name


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw one line per candidate over the size, on logarithmic axes."""

    operation = result["benchmark"]
    half = "half round trip, " if operation == "pingpong" else ""
    panels: Sequence[Panel] = (
        (f"Latency ({half}median of the slowest rank)", "microseconds", lambda row: row["median"] * 1e6, True),
        ("Bus bandwidth", "GB/s", lambda row: row["busbw"], True),
    )
    nodes = f" on {result['nodes']} nodes" if result["nodes"] > 1 else ""
    setting = f"{result['ranks']} ranks{nodes}, {result['dtype']}, {result['mpi']}"

    def fill(figure: Any) -> None:
        axes = figure.subplots(1, 2)
        for each, panel in zip(axes, OVERLAP_PANELS if operation == "overlap" else panels):
            _panel(each, result["rows"], *panel)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
        figure.suptitle(f"{TITLES.get(operation, operation)}, {setting}", fontsize=13, fontweight="bold")

    return save(path, (11.5, 4.8), fill)


def _panel(axes: Any, rows: Sequence[dict[str, Any]], title: str, label: str, value: Value, log: bool) -> None:
    rows = [row for row in rows if row["candidate"] != Name.COPY]
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
    add_grid(axes, **GRID)


def _ticks(axes: Any, sizes: Sequence[int]) -> None:
    """Label the measured sizes, as far as their labels fit."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    step = -(-len(sizes) // 9)
    axes.set_xticks(sizes[::-1][::step], [format_bytes(size) for size in sizes[::-1][::step]], rotation=35, ha="right")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9f}".rstrip("0").rstrip(".")))
