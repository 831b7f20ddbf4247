"""Tables of a result, ratios first, and its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from comm.figures import Figures, names_of, ratio, sizes_of
from comm.names import LIBRARY, OURS, OUTSIDE, PEERS
from comm.overlap import OverlapRow
from comm.sizes import size_text
from comm.targets import Target
from harness import table


def print_ratios(figures: Figures) -> None:
    """Print how many times faster hpctrain is than each of the others, by medians."""
    peers = [name for name in names_of(figures) if name in PEERS]
    if not peers:
        return
    own = [name for name in (OURS, OUTSIDE) if name in names_of(figures)]
    print("times faster (medians)")
    rows = [["size", *(f"{name} vs {peer}" for name in own for peer in peers)]]
    for size in sizes_of(figures):
        values = [ratio(figures, size, name, peer) for name in own for peer in peers]
        rows.append([size_text(size), *("" if value is None else f"{value:.2f}" for value in values)])
    print(table(rows) + "\n")


def print_targets(found: Sequence[Target]) -> None:
    """Print the figures that have a target, and whether they reach it."""
    if found:
        rows = [["target", "measured", "at least", ""]]
        rows += [[one.what, f"{one.value:.2f}", f"{one.target:g}", "" if one.met else "missed"] for one in found]
        print(table(rows) + "\n")


def print_rows(figures: Figures) -> None:
    """Print the table: latencies in microseconds of the slowest rank, bandwidths in GB/s."""
    rows = [["size", "candidate", "min us", "median us", "p95 us", "algbw GB/s", "busbw GB/s", "repeats", "calls"]]
    for size in sizes_of(figures):
        for name in names_of(figures):
            row = figures.get((size, name))
            if row is None:
                continue
            times = [f"{seconds * 1e6:.2f}" for seconds in (row.min, row.median, row.p95)]
            speeds = [f"{speed:.3f}" for speed in (row.algbw, row.busbw)]
            rows.append([size_text(size), name, *times, *speeds, str(row.repeats), str(row.calls)])
    print(_named(rows))


def print_overlap(rows: Sequence[OverlapRow]) -> None:
    """Print the overlap first, then the times behind it, in microseconds."""
    lines = [["size", "candidate", "overlap %", "overall us", "compute us", "communication us", "products"]]
    for row in sorted(rows, key=lambda row: row.size):
        times = [f"{seconds * 1e6:.1f}" for seconds in (row.median, row.compute, row.communication)]
        lines.append([size_text(row.size), row.candidate, f"{row.overlap:.0f}", *times, str(row.products)])
    print(_named(lines))


def _named(rows: Sequence[Sequence[str]]) -> str:
    """Return the table with the candidates' names left-aligned, too."""
    width = max(len(row[1]) for row in rows)
    return table([[row[0], row[1].ljust(width), *row[2:]] for row in rows])


def print_unable(unable: dict[str, str]) -> None:
    """Print which candidates could not take part, and why."""
    for name, why in unable.items():
        print(f"left out: {name}: {why}")


def targets_json(found: Iterable[Target]) -> list[dict[str, Any]]:
    """Return targets as plain values."""
    return [{"what": one.what, "value": one.value, "target": one.target, "met": one.met} for one in found]


def ratios_json(figures: Figures) -> dict[str, dict[str, float]]:
    """Return hpctrain's ratio to each of the others, by name and size."""
    found: dict[str, dict[str, float]] = {}
    for peer in names_of(figures):
        if peer in PEERS:
            values = {str(size): ratio(figures, size, OURS, peer) for size in sizes_of(figures)}
            found[peer] = {size: value for size, value in values.items() if value is not None}
    return found


def explain(library: str) -> str:
    """Return the meaning of the names, in one line."""
    return (
        f"{OURS}: tensors of comm.empty; {OUTSIDE}: any other tensors; "
        f"{LIBRARY}: {library} by mpi4py, in place, one call"
    )
