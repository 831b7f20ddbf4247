"""Tables of a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import table
from racing.names import SILENT


def print_task(name: str, found: Mapping[str, Any], ranks: int) -> None:
    """Print the tables of a task."""
    if "members" in found:
        print(f"{name}: {_race_title(found)}\n")
        print(table(_race(found)) + "\n")
    if "same_bits" in found:
        alike = "the same bits" if found["same_bits"]["alike"] else "DIFFERENT BITS"
        print(f"easgd, trained once more on {found['same_bits']['samples']:,} samples: {alike}\n")
    if "exchange" in found:
        print(table(_exchange(name, found["exchange"])) + "\n")
    if "pace" in found:
        print(table(_pace(name, found["pace"], ranks)) + "\n")


def _race_title(found: Mapping[str, Any]) -> str:
    mark = found.get("mark")
    if not mark:
        return "ddp did not take part"
    return f"ddp reached {mark['accuracy']:.2%} after {mark['samples']:,} samples"


def _race(found: Mapping[str, Any]) -> list[list[str]]:
    head = ["member", "rate", "best accuracy", "samples / ddp", "seconds to target", "updates/s", "samples/s"]
    rows = [[*head, "staleness", "most"]]
    for name, one in found["members"].items():
        times, seconds = one["samples_over_ddp"], one["seconds_to_mark"]
        cells = [f"{one['learning_rate']:g}", f"{one['best_accuracy']:.2%}"]
        cells += ["" if times is None else f"{times:.2f}", "" if seconds is None else f"{seconds:.2f}"]
        cells += [f"{one['updates_a_second']:.1f}", f"{one['samples_a_second']:,.0f}"]
        rows.append([name, *cells, *_staleness(one["staleness_histogram"])])
    return rows


def _staleness(bars: list[int]) -> list[str]:
    """Return mean and maximum; empty if staleness is not counted."""
    if not sum(bars):
        return ["", ""]
    mean = sum(stale * count for stale, count in enumerate(bars)) / sum(bars)
    return [f"{mean:.2f}", str(len(bars) - 1)]


def _exchange(task: str, found: Mapping[str, Any]) -> list[list[str]]:
    head = [f"{task}: per step", "median ms", "quartile 1", "quartile 3", "exchanges, share", "ms per exchange"]
    rows = [[*head, "ms inside"]]
    for name, one in found.items():
        cells = [_milliseconds(one["step"][key]) for key in ("median", "quartile_1", "quartile_3")]
        share = "" if name == SILENT else f"{one['share']:.1%}"
        rows.append([name, *cells, share, _milliseconds(one["exchange"]), _milliseconds(one["inside"])])
    return rows


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def _pace(task: str, found: Mapping[str, Any], ranks: int) -> list[list[str]]:
    rows = [[f"{task}: updates/s", "one worker", f"{ranks} workers", "times"]]
    for name, one in found.items():
        rows.append([name, f"{one['alone']:.1f}", f"{one['together']:.1f}", f"{one['times']:.2f}"])
    return rows
