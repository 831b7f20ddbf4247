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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from communication_candidates import (
    COMMON,
    COPY,
    GLOO,
    LIBRARY,
    MESSAGES,
    NCCL,
    ORDER,
    OURS,
    OUTSIDE,
    PEERS,
    STREAM_SIZE,
)
from harness.plot import GRID, save
from harness.report import table
from harness.stats import percentile
from harness.targets import Target, at_least

from hpctrain.util.plotting import add_grid
from hpctrain.util.text import format_bytes

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "pingpong": lambda ranks: 1.0,
}


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """Return the bytes of the whole tensor divided by the time, in GB/s."""
    return nbytes / seconds / 1e9


def bus_bandwidth(operation: str, nbytes: int, seconds: float, ranks: int) -> float:
    """Return the algorithm bandwidth times the operation's factor, in GB/s."""
    return algorithm_bandwidth(nbytes, seconds) * FACTORS[operation](ranks)


@dataclass(frozen=True)
class Row:
    """Row of the table: seconds per call on the slowest rank, and bandwidths in GB/s from the median."""

    candidate: str
    size: int  # bytes of the whole tensor in the requested dtype
    bytes: int  # bytes of this candidate's tensor, which may have another dtype
    min: float
    median: float
    p95: float
    algbw: float
    busbw: float
    repeats: int
    calls: int  # in each repeat


Figures = dict[tuple[int, str], Row]


def row_of(
    operation: str, name: str, nbytes: int, seconds: Sequence[float], *, ranks: int, size: int, calls: int
) -> Row:
    """Return the row of a candidate's repeats. The time of a ping-pong is half of its round trip."""
    times = [value / 2 for value in seconds] if operation == "pingpong" else list(seconds)
    median = statistics.median(times)
    return Row(
        name,
        size,
        nbytes,
        min(times),
        median,
        percentile(times, 95),
        algorithm_bandwidth(nbytes, median),
        bus_bandwidth(operation, nbytes, median, ranks),
        len(times),
        calls,
    )


def by_size_and_name(rows: Iterable[Row]) -> Figures:
    """Return rows by (size, candidate)."""
    return {(row.size, row.candidate): row for row in rows}


def sizes_of(figures: Figures) -> list[int]:
    """Return the sizes, ascending."""
    return sorted({size for size, _ in figures})


def names_of(figures: Figures) -> list[str]:
    """Return the candidates: hpctrain's in order of appearance, then the others."""
    found = dict.fromkeys(name for _, name in figures)
    return [name for name in found if name not in ORDER] + [name for name in ORDER if name in found]


def speedup(figures: Figures, size: int, name: str, against: str) -> float | None:
    """Return how many times faster a candidate is than another, by medians; None if one of them is missing."""
    own, other = figures.get((size, name)), figures.get((size, against))
    return other.median / own.median if own and other else None


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
        yield from at_least("times gloo at 25 MiB", speedup(figures, GLOO_SIZE, OURS, GLOO), GLOO_TARGET)
    if operation == "all_reduce" and ranks > 2 or operation in ("reduce_scatter", "all_gather", "broadcast"):
        yield from _large(figures, OURS)
    if operation == "all_gather":
        yield from _large(figures, COMMON)
    if operation != "pingpong":
        yield from _never_slower(figures, OURS, PYTHON)
        yield from _never_slower(figures, OUTSIDE, PYTHON)
    if operation == "all_reduce":
        # A copy has the same memory traffic: 2 S / time over 2 S / time of the copy.
        rate = speedup(figures, STREAM_SIZE, OURS, COPY)
        yield from at_least("2 S / (time x streaming rate) at 64 MiB", rate, STREAM_TARGET)
        yield from _twin(figures, twin)


def _mean(figures: Figures) -> Iterator[Target]:
    """Compare with the library's one call, and with the better of that and messages of 16 MiB."""
    for what, others in (("one call", (LIBRARY,)), ("the better of one call and 16 MiB messages", (LIBRARY, MESSAGES))):
        ratios = []
        for size in MEAN_SIZES:
            found = [value for name in others if (value := speedup(figures, size, OURS, name)) is not None]
            if not found:
                return
            ratios.append(min(found))
        mean = statistics.geometric_mean(ratios)
        yield Target(f"times the library ({what}), mean of 64K,1M,4M,25M,64M", mean, MEAN_TARGET)


def _large(figures: Figures, name: str) -> Iterator[Target]:
    found = [
        (value, size)
        for size in sizes_of(figures)
        if size >= LARGE and (value := speedup(figures, size, name, LIBRARY)) is not None
    ]
    if found:
        value, size = min(found)
        yield Target(f"{name}: times the library from 1 MiB up, least (at {format_bytes(size)})", value, LARGE_TARGET)


def _never_slower(figures: Figures, name: str, slack: float) -> Iterator[Target]:
    """Compare with the allowed time: that of the library's own call and the slack."""
    found = []
    for size in sizes_of(figures):
        own, other = figures.get((size, name)), figures.get((size, LIBRARY))
        if own and other:
            found.append(((other.median * (1 + SLACK) + slack) / own.median, size))
    if found:
        value, size = min(found)
        yield Target(f"(library + 5 % + 3 us) / {name}, least (at {format_bytes(size)})", value, 1.0)


def _twin(figures: Figures, twin: str) -> Iterator[Target]:
    """Compare bfloat16 with float32 of equally many elements, whichever of them the run measured."""
    halves = (OURS, twin) if twin.endswith("bfloat16") else (twin, OURS)
    found = []
    for size in sizes_of(figures):
        value = speedup(figures, size, halves[1], halves[0])
        if value is not None:
            found.append((value, size))
    if found:
        value, size = min(found)
        yield Target(f"float32 / bfloat16 of as many elements, least (at {format_bytes(size)})", value, 1.0)


# Output ---------------------------------------------------------------------------------------------------------------


def ratio_tables(figures: Figures) -> Iterator[str]:
    """Yield how many times faster hpctrain is than each of the others, by medians."""
    peers = [name for name in names_of(figures) if name in PEERS]
    own = [name for name in (OURS, OUTSIDE) if name in names_of(figures)]
    rows = [["size", *(f"{name} vs {peer}" for name in own for peer in peers)]]
    for size in sizes_of(figures):
        values = [speedup(figures, size, name, peer) for name in own for peer in peers]
        rows.append([format_bytes(size), *("" if value is None else f"{value:.2f}" for value in values)])
    if peers:
        yield f"times faster (medians)\n{table(rows)}\n"


def row_table(figures: Figures) -> str:
    """Return the table: latencies in microseconds of the slowest rank, bandwidths in GB/s."""
    rows = [["size", "candidate", "min us", "median us", "p95 us", "algbw GB/s", "busbw GB/s", "repeats", "calls"]]
    for size in sizes_of(figures):
        for row in (figures[size, name] for name in names_of(figures) if (size, name) in figures):
            times = [f"{seconds * 1e6:.2f}" for seconds in (row.min, row.median, row.p95)]
            speeds = [f"{speed:.3f}" for speed in (row.algbw, row.busbw)]
            rows.append([format_bytes(size), row.candidate, *times, *speeds, str(row.repeats), str(row.calls)])
    return table(rows, left=2)


def ratios_json(figures: Figures) -> dict[str, dict[str, float]]:
    """Return hpctrain's ratio to each of the others, by name and size."""
    found: dict[str, dict[str, float]] = {}
    for peer in names_of(figures):
        if peer in PEERS:
            values = {str(size): speedup(figures, size, OURS, peer) for size in sizes_of(figures)}
            found[peer] = {size: value for size, value in values.items() if value is not None}
    return found


# hpctrain in blue and thick, the library in orange, torch.distributed in green; named algorithms
# get the other colours.
STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#1f5fbf", "linewidth": 2.6, "marker": "o", "zorder": 5},
    OUTSIDE: {"color": "#6ba3e8", "linewidth": 1.8, "marker": "o", "markerfacecolor": "white", "zorder": 4},
    LIBRARY: {"color": "#d9631e", "linewidth": 1.8, "marker": "s"},
    MESSAGES: {"color": "#d9631e", "linewidth": 1.4, "marker": "s", "linestyle": "--", "markerfacecolor": "white"},
    GLOO: {"color": "#3b8f54", "linewidth": 1.8, "marker": "^"},
    NCCL: {"color": "#3b8f54", "linewidth": 1.8, "marker": "^"},
}
OTHERS = ("#7b4fa6", "#b0508c", "#8a6d3b", "#4f8f9b", "#555555")
TITLES = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "broadcast": "broadcast",
    "pingpong": "send and receive",
    "overlap": "all_reduce behind compute",
}


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw one line per candidate over the size, on logarithmic axes."""

    def fill(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        panels = OVERLAP_PANELS if result["benchmark"] == "overlap" else _panels(result["benchmark"])
        for axes, panel in zip((left, right), panels):
            _panel(axes, result["rows"], *panel)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
        figure.suptitle(_title(result), fontsize=13, fontweight="bold")

    return save(path, (11.5, 4.8), fill)


Value = Callable[[dict[str, Any]], float]
Panel = tuple[str, str, Value, bool]  # title, unit, plotted value, logarithmic axis


def _panels(operation: str) -> Sequence[Panel]:
    half = "half round trip, " if operation == "pingpong" else ""
    return (
        (f"Latency ({half}median of the slowest rank)", "microseconds", lambda row: row["median"] * 1e6, True),
        ("Bus bandwidth", "GB/s", lambda row: row["busbw"], True),
    )


OVERLAP_PANELS: Sequence[Panel] = (
    ("Reduction and compute together", "microseconds", lambda row: row["median"] * 1e6, True),
    ("Reduction hidden behind compute", "percent", lambda row: row["overlap"], False),
)


def _panel(axes: Any, rows: Sequence[dict[str, Any]], title: str, label: str, value: Value, log: bool) -> None:
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
    add_grid(axes, **GRID)


def _ticks(axes: Any, sizes: Sequence[int]) -> None:
    """Label the measured sizes, as far as their labels fit."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    step = -(-len(sizes) // 9)
    axes.set_xticks(sizes[::-1][::step], [format_bytes(size) for size in sizes[::-1][::step]], rotation=35, ha="right")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9f}".rstrip("0").rstrip(".")))


def _title(result: dict[str, Any]) -> str:
    nodes = f" on {result['nodes']} nodes" if result["nodes"] > 1 else ""
    return f"{TITLES[result['benchmark']]}, {result['ranks']} ranks{nodes}, {result['dtype']}, {result['mpi']}"
