"""Plot and text rendering of a pipeline's timeline: one row per rank, one box per pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_lowercase
from typing import Any

from hpctrain.parallel.pipeline.schedules import ActionKind
from hpctrain.parallel.pipeline.timeline import WAITS, Timeline, TimelineSpan
from hpctrain.util.plotting import INK, new_figure
from hpctrain.util.text import without_math

_LETTERS = {**{kind.word: kind.value for kind in ActionKind}, "optimizer": ActionKind.UPDATE.value}
_SHORT = ("update", "optimizer")
_FINEST = 240  # columns of the whole timeline, unless more are requested


def lines(timeline: Timeline, width: int = 120) -> list[str]:
    """Return one line per rank, divided into blocks that are at most ``width`` columns wide.

    The shortest pass is one column, unless that gives more than 240 columns; a dot is an idle
    column. Letters are those of ``ActionKind``, numbers are microbatches. If a rank has several chunks, a
    lowercase letter distinguishes them.
    """
    rows = [_columns(row, timeline, _unit(timeline)) for row in timeline.rows]
    cell = 1 + max((len(text.rstrip("-")) for row in rows for text in row), default=1)
    length = max(map(len, rows), default=0)
    names = [f"{rank}: " for rank in range(len(rows))]
    margin = max(map(len, names), default=0)
    count = max(1, (width - margin) // cell)
    found: list[str] = []
    for start in range(0, length, count):
        found += [""] if start else []
        for name, row in zip(names, rows):
            text = "".join(_padded(part, cell) for part in row[start : start + count])
            found.append((name.rjust(margin) + text).rstrip())
    return found


def fitted(timeline: Timeline, width: int = 120) -> list[str]:
    """Return one line per rank, ``width`` columns wide, for measured times: passes to scale, dots for idle time."""
    names = [f"{rank}: " for rank in range(len(timeline.rows))]
    margin = max(map(len, names), default=0)
    count = max(1, width - margin)
    unit = timeline.makespan / count or 1.0
    found = []
    for name, row in zip(names, timeline.rows):
        text, chunks = ["."] * count, chunks_of(row)
        for span, (first, last) in _places(row, timeline.start, unit):
            drawn = label(span, chunks).ljust(last - first - 1, "-").ljust(last - first)
            text[first:last] = drawn[: last - first]
        found.append((name.rjust(margin) + "".join(text)).rstrip())
    return found


def label(span: TimelineSpan, chunks: list[int]) -> str:
    """Return the letter and microbatch of a pass, and its chunk if the rank has several."""
    number = "" if span.microbatch is None else str(span.microbatch)
    several = len(chunks) > 1 and span.chunk is not None
    return _LETTERS[span.name] + number + (ascii_lowercase[chunks.index(span.chunk or 0) % 26] if several else "")


def chunks_of(row: tuple[TimelineSpan, ...]) -> list[int]:
    """Return the chunks that a rank holds, in the order of the model."""
    return sorted({span.chunk for span in row if span.chunk is not None})


def _unit(timeline: Timeline) -> float:
    """Return the time per column; updates, which may be far shorter than passes, get a column only if they fit."""
    rows = timeline.rows
    times = [span.end - span.start for row in rows for span in row if span.name in _LETTERS and span.name not in _SHORT]
    shortest = min((time for time in times if time > 0), default=1.0)
    return max(shortest, timeline.makespan / _FINEST)


def _columns(row: tuple[TimelineSpan, ...], timeline: Timeline, unit: float) -> list[str]:
    """Return the content of each column of a rank: a label, ``-`` for the rest of that pass, ``.`` for idle time."""
    chunks = chunks_of(row)
    found = ["."] * round(timeline.makespan / unit)
    for span, (first, last) in _places(row, timeline.start, unit):
        for place in range(first, min(last, len(found))):
            found[place] = label(span, chunks) if place == first else "-"
    return found


def _places(row: tuple[TimelineSpan, ...], start: float, unit: float) -> Iterator[tuple[TimelineSpan, tuple[int, int]]]:
    for span in row:
        if span.name in _LETTERS and span.end > span.start:
            yield span, (round((span.start - start) / unit), round((span.end - start) / unit))


def _padded(text: str, cell: int) -> str:
    """Pad a column; a pass that continues from the column before is drawn through."""
    return "-" * (cell - 1) + " " if text == "-" else text.ljust(cell)


# Plot of a timeline as in the papers on pipelines


# Forward passes are blue and backward passes green, as in the figures of PipeDream; the halves of a backward
# pass have two other greens.
COLOURS = {
    "forward": "#3b6fb6",
    "backward": "#5fa55a",
    "loss": "#7e62a1",
    "input": "#1f8a8a",
    "weight": "#a3c644",
    "update": "#e0812b",
    "optimizer": "#e0812b",
}
_SIZED = ("forward", "backward", "input", "weight")  # passes whose numbers should be legible
_IDLE, _WAIT = "#ececec", "#c9c9c9"
_ROW, _BAR = 0.42, 0.86  # inches between rows; fraction of the row height that a box takes
_NARROWEST, _WIDTHS = 0.17, (7.0, 26.0)  # inches: width of the shortest pass; limits of the width of the plot
_MARGINS = 2.1  # inches beside the rows
_SMALLEST = 3.5  # points: smallest size of a number; smaller ones are omitted


def figure(timeline: Timeline, title: str, *, names: Sequence[str] | None = None, unit: str = "") -> Any:
    """Return the plot as a matplotlib figure. Raises ``UsageError`` without matplotlib.

    The title shows the idle fraction of all ranks. Each row shows its own idle fraction, and the
    largest number of microbatches that the rank holds. ``names`` are the names of the rows, by
    default the stages; ``unit`` is the name of the unit of time.
    """
    width = _width(timeline)
    found = new_figure(width + _MARGINS, _ROW * len(timeline.rows) + 1.25)
    axis = found.subplots()
    scale = 72 * width / (timeline.makespan or 1.0)  # points per unit of time
    for rank, row in enumerate(timeline.rows):
        _draw_row(axis, row, rank, timeline, scale)
    _draw_frame(axis, timeline, names or [f"stage {rank}" for rank in range(len(timeline.rows))], unit)
    axis.set_title(f"{without_math(title)}: bubble {timeline.bubble:.1%}", loc="left", fontsize=11, color=INK)
    _draw_legend(axis, timeline)
    return found


def _width(timeline: Timeline) -> float:
    """Return the width of the rows in inches, chosen so that numbers fit into most boxes."""
    times = sorted(span.end - span.start for row in timeline.rows for span in row if span.name in _SIZED)
    times = [time for time in times if time > 0]
    typical = times[len(times) // 10] if times else 1.0  # measured times contain a few very short ones
    low, high = _WIDTHS
    return min(max(timeline.makespan / typical * _NARROWEST, low), high)


def _draw_row(axis: Any, row: tuple[TimelineSpan, ...], rank: int, timeline: Timeline, scale: float) -> None:
    chunks = chunks_of(row)
    origin = timeline.start
    axis.broken_barh([(0, timeline.makespan)], (rank - _BAR / 2, _BAR), facecolor=_IDLE, linewidth=0)
    painted: dict[str, list[TimelineSpan]] = {}  # by colour: one call per box would take seconds
    for span in row:
        if span.name in COLOURS and span.end > span.start:
            painted.setdefault(_colour(span, chunks), []).append(span)
    for colour, spans in painted.items():
        places = [(span.start - origin, span.end - span.start) for span in spans]
        edges = [min(0.8, 0.1 * length * scale) for _, length in places]
        band = (rank - _BAR / 2, _BAR)
        axis.broken_barh(places, band, facecolor=colour, edgecolor="white", linewidth=edges, zorder=2)
        for span in spans:
            _write_number(axis, span, rank, origin, scale, "white" if _is_dark(colour) else INK)
    # Drawn over the boxes: a wait inside a pass is idle time.
    waits = [(span.start - origin, span.end - span.start) for span in row if span.name in WAITS]
    axis.broken_barh(waits, (rank - _BAR / 2, _BAR), facecolor=_WAIT, linewidth=0, zorder=3)


def _colour(span: TimelineSpan, chunks: list[int]) -> str:
    shade = chunks.index(span.chunk) / len(chunks) if span.chunk in chunks else 0.0
    return _lighter(COLOURS[span.name], 0.9 * shade)


def _write_number(axis: Any, span: TimelineSpan, rank: int, origin: float, scale: float, colour: str) -> None:
    """Write a microbatch's number into its box, if it fits."""
    text = "" if span.microbatch is None else str(span.microbatch)
    length = span.end - span.start
    size = min(8.5, 1.35 * length * scale / max(len(text), 1))
    if text and size >= _SMALLEST:
        middle, centred = span.start - origin + length / 2, {"ha": "center", "va": "center_baseline"}
        axis.text(middle, rank, text, fontsize=size, color=colour, zorder=4, **centred)


def _draw_frame(axis: Any, timeline: Timeline, names: Sequence[str], unit: str) -> None:
    ranks = range(len(timeline.rows))
    axis.set_xlim(0, timeline.makespan or 1.0)
    axis.set_ylim(len(ranks) - 0.45, -0.55)
    axis.set_yticks(ranks, list(map(without_math, names)))
    axis.set_xlabel(f"time ({unit})" if unit else "time", color=INK)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    beside = axis.secondary_yaxis("right")
    whole = timeline.makespan or 1.0
    texts = [f"{timeline.most_live(rank)} live, idle {timeline.idle(rank) / whole:.0%}" for rank in ranks]
    beside.set_yticks(ranks, texts, color=INK)
    beside.tick_params(length=0)
    beside.spines["right"].set_visible(False)


def _draw_legend(axis: Any, timeline: Timeline) -> None:
    """Add a legend of the colours that occur, below the rows."""
    from matplotlib.patches import Patch

    names = {span.name for row in timeline.rows for span in row}
    several = any(len(chunks_of(row)) > 1 for row in timeline.rows)
    patches = [Patch(facecolor=colour, label=name) for name, colour in COLOURS.items() if name in names]
    if several and patches:
        patches[0].set_label(f"{patches[0].get_label()} (later chunks are lighter)")
    if names.intersection(WAITS):
        patches.append(Patch(facecolor=_WAIT, label="waiting for others"))
    patches.append(Patch(facecolor=_IDLE, label="idle"))
    axis.figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9, handlelength=1.2
    )


def _lighter(colour: str, share: float) -> str:
    """Mix a colour with white."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 150
