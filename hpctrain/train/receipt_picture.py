"""Timeline chart of the attempts of runs: where the time of each was spent. Needs neither torch nor MPI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.train.receipt_attempt import Attempt
from hpctrain.train.receipt_read import RunReceipt
from hpctrain.train.receipt_text import PARTS, sentence, totals
from hpctrain.util import atomic
from hpctrain.util.text import without_math

KINDS = (".png", ".svg", ".pdf")
_COLOURS = {
    "startup": "#e0812b",
    "useful": "#5fa55a",
    "saves": "#3b6fb6",
    "other": "#c9c9c9",
    "repeated": "#c0504d",
}  # in drawing order: repeated steps were the last ones of an attempt
_INK, _BAR = "#333333", 0.7
_ROW, _TALLEST = 0.34, 20.0  # inches
_UNITS = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}


def draw(receipts: Sequence[RunReceipt], path: str | Path) -> None:
    """Draw the attempts into a file; the suffix selects the format. Raises ``UsageError`` if this fails."""
    path = Path(path)
    if path.suffix not in KINDS:
        raise UsageError(f"cannot draw {path}: a picture's name ends in {', '.join(KINDS)}")
    picture = figure(receipts)
    try:
        with atomic.replacing(path) as out:
            picture.savefig(out, format=path.suffix[1:], dpi=150)
    except OSError as error:
        raise UsageError(f"cannot draw {path}: {error.strerror}") from error


def figure(receipts: Sequence[RunReceipt]) -> Any:
    """Return the chart as a matplotlib figure. Raises ``UsageError`` if matplotlib is not installed.

    Within an attempt, the categories are drawn one after another. Each bar has the category's total
    length; its position does not show when the time was spent.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("drawing needs matplotlib: pip install 'hpctrain[plot]'") from error
    rows = [(_label(receipts, receipt, one), one) for receipt in receipts for one in receipt.attempts]
    zero = min((one.started for _, one in rows if one.started is not None), default=0.0)
    ends = [(one.started or zero) - zero + one.elapsed for _, one in rows]
    unit = next((name for name, seconds in _UNITS.items() if max(ends) >= 2 * seconds), "seconds")
    found = Figure(figsize=(10, min(_ROW * len(rows) + 1.6, _TALLEST)), layout="constrained")
    axis = found.subplots()
    for index, (_, one) in enumerate(rows):
        _draw_attempt(axis, index, one, zero, _UNITS[unit])
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel(f"{unit} since the first start")
    axis.set_title(sentence(totals(receipts)), loc="left", fontsize=11, color=_INK)
    _draw_frame(axis)
    return found


def _label(receipts: Sequence[RunReceipt], receipt: RunReceipt, one: Attempt) -> str:
    of = f"{without_math(receipt.folder.name)} " if len(receipts) > 1 else "attempt "
    return f"{of}{one.index}"


def _draw_attempt(axis: Any, index: int, one: Attempt, zero: float, scale: float) -> None:
    at = ((one.started or zero) - zero) / scale
    for part, colour in _COLOURS.items():
        width = getattr(one, part) / scale
        axis.broken_barh([(at, width)], (index - _BAR / 2, _BAR), facecolor=colour, linewidth=0)
        at += width
    axis.text(at, index, f"  {without_math(one.status)}", va="center", fontsize=8, color=_INK)


def _draw_frame(axis: Any) -> None:
    from matplotlib.patches import Patch

    axis.margins(x=0.08)
    axis.set_xlim(left=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, axis="x", color="#ececec", linewidth=0.8)
    axis.set_axisbelow(True)
    patches = [Patch(facecolor=colour, label=PARTS[part]) for part, colour in _COLOURS.items()]
    axis.figure.legend(handles=patches, frameon=False, fontsize=9, ncols=len(patches), loc="outside lower center")
