"""Curves of a run, read from its checkpoint in bounded memory, as a line of text or as a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import Array
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.util.plotting import add_grid, check_suffix, new_figure, save_figure
from hpctrain.util.text import without_math

LONGEST = 20_000  # points returned: files have half as many, those of older versions or other programs any number

_LARGEST = 1 << 30  # bytes of a curve

_HIGHEST = 1e100
_BARS = "▁▂▃▄▅▆▇█"


def read_curves(reader: Reader, longest: int = LONGEST) -> dict[str, list[float]]:
    """Return the curves of a run by name; longer ones are thinned to every n-th point, counted from the last."""
    found = reader.below(layout.TRAIN)
    return {name: read_curve(reader, record.path, longest) for name, record in found.items() if len(record.shape) == 1}


def read_curve(reader: Reader, path: str, longest: int = LONGEST) -> list[float]:
    """Return one curve. Raises ``CheckpointError`` if its bytes are damaged."""
    record = reader.records[path]
    count = math.prod(record.shape)
    if record.nbytes > _LARGEST:
        raise CheckpointError(f"{reader.path}: {path} claims {count} points: a curve has at most {_LARGEST // 8}")
    stride, seen = max(1, -(-count // longest)), 0
    points: list[float] = []
    for piece in reader.pieces(path):
        first = (count - 1 - seen) % stride
        points += as_floats(piece[first::stride], record.dtype).tolist()
        seen += piece.size
    return points


def as_floats(array: Array, dtype: str) -> npt.NDArray[np.float64]:
    """Return stored numbers as float64, including bfloat16."""
    if dtype == "bfloat16":
        return widened(array).astype(np.float64)
    return array.astype(np.float64)


def widened(array: Array) -> npt.NDArray[np.float32]:
    """Return bfloat16 numbers, which are stored as integers, as float32 with the same values."""
    return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)


def is_steps(name: str) -> bool:
    """Return whether a curve contains the steps of other curves instead of values of the run."""
    return name == "step" or name.endswith("_step")


def steps_of(curves: Mapping[str, Sequence[float]], name: str) -> Sequence[float]:
    """Return the steps of a curve; the indices from 1 if the file has no steps of the same length."""
    for steps in (f"{name}_step", "validation_step" if name == "validation_loss" else "step", "step"):
        if len(curves.get(steps, ())) == len(curves[name]):
            return curves[steps]
    return range(1, len(curves[name]) + 1)


def drawable(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return values clipped to a range that sums and plots can handle; infinity becomes NaN, NaN stays."""
    return np.where(np.isfinite(values), np.clip(values, -_HIGHEST, _HIGHEST), np.nan)


def sparkline(values: Iterable[float], width: int = 60) -> str:
    """Return a curve as one line of text: a bar per group of points with their mean, a space if no point is finite."""
    data = drawable(np.asarray(list(values), dtype=np.float64))
    stretches = np.array_split(data, min(width, data.size)) if data.size else []
    means = [_finite_mean(stretch) for stretch in stretches]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    scale = (len(_BARS) - 1) / span if span > 0 else 0.0
    return "".join(" " if mean is None else _BARS[round((mean - low) * scale)] for mean in means)


def _finite_mean(values: npt.NDArray[np.float64]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else None


# Plot of the curves in a checkpoint: losses in the upper panel, each other logged value in a panel below --------------


_INK, _PALE, _MARK = "#1f4e79", "#9dbad7", "#c55a11"
_BELOW = {"learning_rate": "learning rate", "grad_norm": "gradient norm"}
_HISTOGRAM = "staleness_histogram"
_HANDED_OUT = 100  # bars that a run writes; the last one also counts higher staleness
_ROUGH = 200  # points: longer curves also get a running mean

Floats = npt.NDArray[np.float64]
Curves = Mapping[str, Sequence[float]]


def plot(file: str | Path, output: str | Path) -> None:
    """Plot the curves of a checkpoint to an image. Raises ``UsageError`` without curves or without matplotlib."""
    target = Path(output)
    check_suffix(target)
    save_figure(draw(file), target)


def draw(file: str | Path) -> Any:
    """Return the figure of the curves of a checkpoint."""
    with Reader(file) as reader:
        found, step = read_curves(reader), reader.root.get("step")
    curves = {name: drawable(np.asarray(values, dtype=np.float64)).tolist() for name, values in found.items()}
    top = _losses(curves)
    if not top:
        raise UsageError(f"{file} holds no curve to draw: hpctrain checkpoint show FILE lists what it holds")
    title = f"{without_math(Path(file).name)}: {', '.join(map(_label, top))} up to step {without_math(step)}"
    return _figure(curves, top, title)


def _losses(curves: Curves) -> list[str]:
    """Return the curves of the upper panel: ``loss``, else all with ``loss`` in their name, else the first one."""
    drawn = _drawable(curves)
    if "loss" in drawn or (curves.get("loss") and not drawn):
        return ["loss"]
    return [name for name in drawn if "loss" in name] or drawn[:1]


def _drawable(curves: Curves) -> list[str]:
    """Return the names of curves with a finite value, those that every run logs last."""
    names = [name for name, values in curves.items() if not is_steps(name) and name != _HISTOGRAM and _finite(values)]
    return [name for name in names if name not in _BELOW] + [name for name in _BELOW if name in names]


def _label(name: str) -> str:
    return _BELOW.get(name, without_math(name.replace("_", " ")))


def _figure(curves: Curves, top: Sequence[str], title: str) -> Any:
    others = [name for name in _drawable(curves) if name not in (*top, "validation_loss")]
    below = [name for name in others if name in _BELOW] + [name for name in others if name not in _BELOW]
    counts = [count if count > 0 else 0.0 for count in curves.get(_HISTOGRAM, ())]
    figure = new_figure(8, 4.5 + 1.3 * len(below) + 1.8 * any(counts))
    rows = [3.5, *[1] * len(below), *[1.2] * any(counts)]
    grid = figure.add_gridspec(len(rows), height_ratios=rows)
    axes = [figure.add_subplot(grid[0])]
    for row in range(1, 1 + len(below)):
        axes[-1].tick_params(labelbottom=False)
        axes.append(figure.add_subplot(grid[row], sharex=axes[0]))
    _draw_losses(axes[0], curves, top)
    axes[0].set_title(title, loc="left", fontsize=11)
    for axis, name in zip(axes[1:], below):
        axis.plot(steps_of(curves, name), curves[name], color=_INK, linewidth=0.7)
        axis.set_ylabel(_label(name))
    axes[-1].set_xlabel("step")
    if any(counts):
        axes.append(figure.add_subplot(grid[-1]))
        _draw_staleness(axes[-1], counts)
    figure.align_ylabels(axes)
    for axis in axes:
        add_grid(axis, color="#e5e5e5", linewidth=0.6)
    return figure


def _draw_staleness(axis: Any, counts: Sequence[float]) -> None:
    """Draw the number of updates per staleness, on a scale that shows the few very stale ones."""
    axis.bar(range(len(counts)), counts, width=0.85, color=_PALE)
    axis.set_yscale("log")
    axis.set_ylim(bottom=0.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    more = " (the last bar: and above)" if len(counts) == _HANDED_OUT else ""
    axis.set_xlabel(f"staleness: updates of others between reading and updating{more}")
    axis.set_ylabel("updates")


def _draw_losses(axis: Any, curves: Curves, top: Sequence[str]) -> None:
    if list(top) == ["loss"]:
        _draw_loss(axis, curves)
    for name in top:
        if name not in ("loss", "validation_loss"):
            axis.plot(steps_of(curves, name), curves[name], linewidth=1.2, label=_label(name))
    if _finite(curves.get("validation_loss", ())):
        at = steps_of(curves, "validation_loss")
        axis.plot(at, curves["validation_loss"], "o-", color=_MARK, linewidth=1, markersize=4, label="validation")
    axis.set_ylabel("loss" if all("loss" in name for name in top) else _label(top[0]))
    axis.legend(frameon=False)


def _draw_loss(axis: Any, curves: Curves) -> None:
    loss = np.asarray(curves["loss"], dtype=np.float64)
    steps = steps_of(curves, "loss")
    if loss.size > _ROUGH:
        width = loss.size // 50 | 1  # odd: symmetric around each point
        smooth = running_mean(loss, width)
        axis.plot(steps, loss, color=_PALE, linewidth=0.6, label="training")
        axis.plot(steps, smooth, color=_INK, linewidth=1.6, label=f"training, mean of {width} points")
    else:
        axis.plot(steps, loss, color=_INK, linewidth=1.4, label="training")


def running_mean(values: Floats, width: int) -> Floats:
    """Return the mean of the finite values around each value, up to ``width // 2`` on either side."""
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(values.size)
    low, high = np.maximum(places - width // 2, 0), np.minimum(places + width // 2 + 1, values.size)
    known = count[high] - count[low]
    mean: Floats = np.divide(total[high] - total[low], known, out=np.full(values.shape, np.nan), where=known > 0)
    return mean


def _finite(values: Sequence[float]) -> bool:
    return any(map(math.isfinite, values))
