"""Text rendering of a timeline for a terminal: ``F0 F1 . . B0----``."""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_lowercase

from hpctrain.parallel.pipeline.action import Kind
from hpctrain.parallel.pipeline.timeline import Span, Timeline

_LETTERS = {**{kind.word: kind.value for kind in Kind}, "optimizer": Kind.UPDATE.value}
_SHORT = ("update", "optimizer")
_FINEST = 240  # columns of the whole timeline, unless more are requested


def lines(timeline: Timeline, width: int = 120) -> list[str]:
    """Return one line per rank, divided into blocks that are at most ``width`` columns wide.

    The shortest pass is one column, unless that gives more than 240 columns; a dot is an idle
    column. Letters are those of ``Kind``, numbers are microbatches. If a rank has several chunks, a
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


def label(span: Span, chunks: list[int]) -> str:
    """Return the letter and microbatch of a pass, and its chunk if the rank has several."""
    number = "" if span.microbatch is None else str(span.microbatch)
    several = len(chunks) > 1 and span.chunk is not None
    return _LETTERS[span.name] + number + (ascii_lowercase[chunks.index(span.chunk or 0) % 26] if several else "")


def chunks_of(row: tuple[Span, ...]) -> list[int]:
    """Return the chunks that a rank holds, in the order of the model."""
    return sorted({span.chunk for span in row if span.chunk is not None})


def _unit(timeline: Timeline) -> float:
    """Return the time per column; updates, which may be far shorter than passes, get a column only if they fit."""
    rows = timeline.rows
    times = [span.end - span.start for row in rows for span in row if span.name in _LETTERS and span.name not in _SHORT]
    shortest = min((time for time in times if time > 0), default=1.0)
    return max(shortest, timeline.makespan / _FINEST)


def _columns(row: tuple[Span, ...], timeline: Timeline, unit: float) -> list[str]:
    """Return the content of each column of a rank: a label, ``-`` for the rest of that pass, ``.`` for idle time."""
    chunks = chunks_of(row)
    found = ["."] * round(timeline.makespan / unit)
    for span, (first, last) in _places(row, timeline.start, unit):
        for place in range(first, min(last, len(found))):
            found[place] = label(span, chunks) if place == first else "-"
    return found


def _places(row: tuple[Span, ...], start: float, unit: float) -> Iterator[tuple[Span, tuple[int, int]]]:
    for span in row:
        if span.name in _LETTERS and span.end > span.start:
            yield span, (round((span.start - start) / unit), round((span.end - start) / unit))


def _padded(text: str, cell: int) -> str:
    """Pad a column; a pass that continues from the column before is drawn through."""
    return "-" * (cell - 1) + " " if text == "-" else text.ljust(cell)
