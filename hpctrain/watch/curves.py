"""Curves of a run for a terminal: few points of each value over the steps, and their drawing with characters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.train import metrics
from hpctrain.watch.rows import MetricsFile, Row
from hpctrain.watch.state import is_validation

Curve = tuple[list[int], list[float]]  # steps and values
POINTS = 400  # more than a wide terminal has columns of dots
_MOST_NEW = 4 * 1024 * 1024  # bytes that are read as a whole when a file has grown
_FEW = 3  # points that a curve must have to be drawn as a line
_NOT_DRAWN = (*metrics.TIMES[1:], "step", "unix_time", "tokens", "samples", "lost_ranks", "skipped")


class CurveReader:
    """Reader of the curves of a run: at first from parts of the whole file, then from what has been appended to it."""

    def __init__(self, folder: Path, points: int = POINTS) -> None:
        self._path, self._points = folder / metrics.NAME, points
        self._rows: dict[int, Row] = {}
        self._identity: tuple[int, int] | None = None
        self._end = 0  # bytes of the file that have been read

    def read(self) -> dict[str, Curve]:
        """Return the curves by name, in the order in which they should be shown. Raises ``UsageError``."""
        try:
            with MetricsFile.opened(self._path) as file:
                self._update(file)
        except OSError as error:
            raise UsageError(f"cannot read {self._path}: {error.strerror}") from error
        return curves_of_rows([self._rows[step] for step in sorted(self._rows)])

    def _update(self, file: MetricsFile) -> None:
        grows = file.identity == self._identity and self._end <= file.size < self._end + _MOST_NEW
        if grows:
            rows, self._end = file.after(self._end)
        else:
            rows, self._end, self._rows = [*file.rare(self._points), *file.sampled(self._points)], file.end, {}
        self._identity = file.identity
        self._rows |= {row["step"]: row for row in rows}
        if len(self._rows) > 4 * self._points:
            self._identity = None  # the next call takes fewer points of all of it


def read_curves(folder: Path, points: int = POINTS) -> dict[str, Curve]:
    """Return the curves of a run by name, in the order in which they should be shown. Raises ``UsageError``."""
    return CurveReader(folder, points).read()


def curves_of_rows(rows: Sequence[Row]) -> dict[str, Curve]:
    """Return the curves of the values in rows by name, in the order in which they should be shown."""
    found: dict[str, Curve] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NOT_DRAWN and type(value) in (int, float) and math.isfinite(value):
                steps, values = found.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(float(value))
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[int, str]:
    """Return a key by which losses come first, then validation, then the other values."""
    first = 0 if name == "loss" else 1 if "loss" in name else 2 if is_validation(name) else 3
    return (4 if name == "step_seconds" else first), name


def shown_together(name: str, curves: Mapping[str, Curve]) -> list[str]:
    """Return the names of the curves to draw into one picture: a loss with the validation losses."""
    others = [other for other in curves if is_validation(other) and ("loss" in other or other in ("val", "eval"))]
    return [name, *others] if name == "loss" else [name]


def best_of(name: str, curve: Curve) -> tuple[int, float]:
    """Return step and value of the best point of a curve: the lowest, of accuracies and scores the highest."""
    grows = any(word in name.lower() for word in ("acc", "score", "f1", "auc", "bleu", "iou"))
    steps, values = curve
    at = values.index(max(values) if grows else min(values))
    return steps[at], values[at]


def drawn(names: list[str], curves: Mapping[str, Curve], width: int, height: int, *, colour: bool) -> str:
    """Return a picture of some curves in characters, with ANSI colours if requested."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    for number, name in enumerate(names):
        steps, values = curves[name]
        colours = ("blue", "orange", "green", "magenta")
        options = {"color": colours[number % 4]} if colour else {}
        marker = "braille" if number == 0 and len(steps) >= _FEW else "o"
        draw = plotext.plot if number == 0 and len(steps) >= _FEW else plotext.scatter
        draw(steps, values, marker=marker, label=name if len(names) > 1 else None, **options)
    ticks = sorted({steps[index] for steps in [curves[names[0]][0]] for index in (0, len(steps) // 2, -1)})
    plotext.xticks(ticks, [f"{tick:,}" for tick in ticks])
    picture: str = plotext.build()
    return picture if colour else plotext.uncolorize(picture)
