"""Curves of a run for a terminal: few points of each value over the steps, and their drawing with characters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import plotext

from hpctrain.errors import UsageError
from hpctrain.train import metrics
from hpctrain.watch.rows import MetricsFile
from hpctrain.watch.state import is_validation

Curve = tuple[list[int], list[float]]  # steps and values
POINTS = 400  # more than a wide terminal has columns of dots
_FEW = 3  # points that a curve must have to be drawn as a line
_NOT_DRAWN = (*metrics.TIMES[1:], "step", "unix_time", "tokens", "samples", "lost_ranks", "skipped")


def read_curves(folder: Path, points: int = POINTS) -> dict[str, Curve]:
    """Return the curves of a run by name, in the order in which they should be shown."""
    try:
        with MetricsFile.opened(folder / metrics.NAME) as file:
            rows = {row["step"]: row for row in (*file.rare(points), *file.sampled(points))}
    except OSError as error:
        raise UsageError(f"cannot read {folder / metrics.NAME}: {error.strerror}") from error
    found: dict[str, Curve] = {}
    for step in sorted(rows):
        for name, value in rows[step].items():
            if name not in _NOT_DRAWN and type(value) in (int, float) and math.isfinite(value):
                steps, values = found.setdefault(name, ([], []))
                steps.append(step)
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
