"""Curves of a run, read from its checkpoint in bounded memory, and drawn as a line of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hpctrain.checkpoint.file import layout
from hpctrain.checkpoint.file.layout import Array
from hpctrain.checkpoint.file.reader import Reader
from hpctrain.errors import CheckpointError

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
