"""Plots of a result: loss against wall time, accuracy against samples, and staleness of updates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from racing.names import DDP, DIGITS, MEMBERS

# Black for ddp, the reference; similar hues for variants of the same strategy.
COLOURS = dict(
    zip(
        MEMBERS,
        ("black", "#1f5fbf", "#74a9e8", "#12897b", "#7a4fb5", "#8ac926", "#d9631e", "#f2a65a", "#c2185b"),
        strict=True,
    )
)
LOOK: Any = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
THICK, THIN = 3.0, 1.3
SHOWN = 8  # points of accuracy below the best


def draw(result: Mapping[str, Any], path: Path) -> list[Path]:
    """Plot a result next to its JSON, as PNG and SVG; return the files, an empty list without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    raced = {name: one for name, one in result["tasks"].items() if "members" in one}
    files = []
    with matplotlib.rc_context(LOOK):
        for name, found in raced.items():
            files += _save(_curves(name, found, result["ranks"]), path.with_name(f"{path.name}-{name}"))
        stale = {name: histograms(one["members"]) for name, one in raced.items() if histograms(one["members"])}
        if stale:
            files += _save(_staleness(stale, result["ranks"]), path.with_name(f"{path.name}-staleness"))
    return files


def _save(figure: Any, path: Path) -> list[Path]:
    from matplotlib import pyplot

    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
    return files


def _curves(name: str, found: Mapping[str, Any], ranks: int) -> Any:
    """Plot loss against seconds, and accuracy against samples with a band of one point below the mark."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for member, one in found["members"].items():
        look = {"color": COLOURS[member], "linewidth": THICK if member == DDP else THIN, "label": member}
        points = one["points"]
        left.plot([point["seconds"] for point in points], [point["loss"] for point in points], **look)
        right.plot([point["samples"] for point in points], [point["accuracy"] * 100 for point in points], **look)
    left.set(xlabel="seconds of training", ylabel="validation loss (nats)")
    right.set(xlabel="samples over all workers", ylabel="validation accuracy (%)")
    if name == DIGITS:  # most accuracies are high early: show the differences at the end
        left.set_yscale("log")
        highest = 100 * max(one["best_accuracy"] for one in found["members"].values())
        right.set_ylim(highest - SHOWN, highest + 0.5)
    if "mark" in found:
        best = found["mark"]["accuracy"] * 100
        right.axhspan(best - 1, best, color="#eeeeee", zorder=0, label="a point below ddp's best")
    for axes in (left, right):
        axes.grid(True, color="#e4e4e4", linewidth=0.6, zorder=0)
        axes.set_axisbelow(True)
    right.legend(loc="lower right", fontsize=8.5, frameon=False)
    figure.suptitle(title(name, ranks), x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def histograms(members: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the share of updates by staleness, from 0 on, of members that count it."""
    found = {}
    for name, one in members.items():
        bars = one["staleness_histogram"]
        if sum(bars):
            found[name] = [count / sum(bars) for count in bars]
    return found


def _staleness(tasks: Mapping[str, Mapping[str, list[float]]], ranks: int) -> Any:
    """Plot the shares by staleness, with members side by side and one panel per task."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(tasks), figsize=(5.5 * len(tasks), 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (name, members) in zip(panels[0], tasks.items()):
        width = 0.8 / len(members)
        for place, (member, shares) in enumerate(members.items()):
            at = [stale + (place - (len(members) - 1) / 2) * width for stale in range(len(shares))]
            axes.bar(at, [share * 100 for share in shares], width, color=COLOURS[member], label=member)
        axes.set(title=name, xlabel="updates of others between reading and updating")
        axes.set_xticks(range(_last_of_interest(members) + 1))
        axes.set_xlim(-0.6, _last_of_interest(members) + 0.6)
        axes.grid(True, axis="y", color="#e4e4e4", linewidth=0.6, zorder=0)
        axes.set_axisbelow(True)
    panels[0][0].set_ylabel("share of updates (%)")
    panels[0][-1].legend(fontsize=8.5, frameon=False)
    figure.suptitle(f"staleness, {ranks} workers", x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def _last_of_interest(members: Mapping[str, list[float]], least: float = 0.005) -> int:
    """Return the highest staleness with a visible share of any member's updates."""
    return max(stale for shares in members.values() for stale, share in enumerate(shares) if share >= least)


def title(task: str, ranks: int) -> str:
    """Return a title that states the task."""
    what = "convnet on digits" if task == DIGITS else "GPT on bytes"
    return f"{what}, {ranks} workers"
