"""Tables of a result, ratios first, and its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness import table
from saving.background import BackgroundRow
from saving.figures import Figures, ratio
from saving.names import CRC, DCP_LOAD, LOAD, OURS, READERS, TORCH_LOAD, WRITERS
from saving.targets import Target

MIB = 2**20
_SMALL = 0.005  # smaller figures would show as zero with two decimals


def print_targets(found: Sequence[Target]) -> None:
    """Print the figures that have a target, and whether they reach it."""
    if found:
        rows = [["target", "measured", "wanted", ""]]
        rows += [[one.what, _figure(one.value), one.wanted, "reached" if one.met else "missed"] for one in found]
        print(table(rows) + "\n")


def _figure(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.1e}" if 0 < value < _SMALL else f"{value:.2f}"


def print_ratios(figures: Figures) -> None:
    """Print how many times faster hpctrain is than each of the others, by medians."""
    rows = [["times as fast as", "saving", "loading"]]
    named = [*WRITERS, *(name for name in READERS if name in (TORCH_LOAD, DCP_LOAD))]
    for name, saving, loading in ((name, ratio(figures, OURS, name), ratio(figures, LOAD, name)) for name in named):
        if name == OURS or name not in figures:
            continue
        value = loading if name in READERS else saving
        cells = ["", f"{value:.2f}"] if name in READERS else [f"{value:.2f}", ""]
        if value is not None:
            rows.append([name, *cells])
    if len(rows) > 1:
        print(table(rows) + "\n")


def print_rows(figures: Figures) -> None:
    """Print the table: seconds of the slowest rank, 10^9 bytes per second, and the largest growth of memory."""
    if not figures:
        return
    rows = [["", "median s", "min", "max", "GB/s", "memory +MiB", "rounds"]]
    for row in figures.values():
        times = [f"{seconds:.3f}" for seconds in (row.median, row.min, row.max)]
        growth = "" if row.growth is None or row.candidate == CRC else f"{row.growth / MIB:.0f}"
        rows.append([row.candidate, *times, f"{row.rate:.2f}", growth, str(row.repeats)])
    print(table(rows))


def print_background(rows: Sequence[BackgroundRow]) -> None:
    """Print the effect of saving on a training loop: seconds of the slowest rank, medians."""
    if not rows:
        return
    head = ["in a training loop", "stall s", "copy of a share", "until written", "step", "step meanwhile"]
    lines = [[*head, "steps meanwhile", "saves"]]
    for row in rows:
        times = [f"{seconds:.3f}" for seconds in (row.stall, row.floor, row.written, row.free)]
        busy = "" if row.busy is None else f"{row.busy:.3f}"
        lines.append([row.candidate, *times, busy, str(row.busy_steps), str(row.saves)])
    print("\n" + table(lines))


def print_unable(unable: dict[str, str]) -> None:
    """Print which candidates could not take part, and why."""
    for name, why in unable.items():
        print(f"left out: {name}: {why}")


def targets_json(found: Iterable[Target]) -> list[dict[str, Any]]:
    """Return targets as plain values."""
    return [{"what": one.what, "value": one.value, "wanted": one.wanted, "met": one.met} for one in found]
