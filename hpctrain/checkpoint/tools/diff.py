"""Differences between two checkpoints: tensors by name, shape and value, settings, values of the loop, versions.

This needs h5py and NumPy only. Both files are read once, side by side, in bounded memory.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import Array, Record, shape_text
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.tools.curves import as_floats

Progress = Callable[[int], object]
Names = tuple[str | None, str | None]

# Versions that affect the numbers that a run computes; user, place and time of the run do not.
VERSIONS = ("hpctrain", "python", "torch", "numpy", "mpi4py", "h5py", "hdf5", "creator", "format_version")
_PROVENANCE = ("created", "creator", "format_version", layout.DIGEST)  # of the root


@dataclass(frozen=True)
class TensorDifference:
    """Difference of a tensor.

    ``problem`` is ``missing`` (``first`` or ``second`` is ``None``), ``shape``, ``dtype`` or
    ``values``. For ``values``, ``count`` of ``elements`` differ in their bits: by at most
    ``maximum``, and relative to the larger one of each pair by at most ``relative``. ``nonfinite``
    counts the pairs with a NaN or an infinity. ``maximum`` and ``relative`` are ``None`` if no
    other pairs differ.
    """

    path: str
    problem: str
    first: str | None
    second: str | None
    elements: int = 0
    count: int = 0
    maximum: float | None = None
    relative: float | None = None
    nonfinite: int = 0


@dataclass(frozen=True)
class ValueDifference:
    """Difference of a value; ``None`` marks a missing one."""

    place: str
    name: str
    first: str | None
    second: str | None


@dataclass
class Diff:
    """All differences of two files; ``provenance`` (user, place, time) is reported but does not count."""

    first: str
    second: str
    fingerprints: tuple[str, str] = ("", "")  # of all models and optimizers
    equal: int = 0  # number of equal tensors
    tensors: list[TensorDifference] = field(default_factory=list)
    settings: list[ValueDifference] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    versions: list[ValueDifference] = field(default_factory=list)
    provenance: list[ValueDifference] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Return whether both files have the same run at the same step, computed with the same versions."""
        return not (self.tensors or self.settings or self.values or self.versions)


def diff(first: str | Path, second: str | Path, progress: Progress | None = None) -> Diff:
    """Compare two checkpoints. Raises ``CheckpointError`` if one of them is damaged."""
    with Reader(first) as one, Reader(second) as two:
        found = Diff(str(first), str(second), (one.fingerprint, two.fingerprint))
        for path in one.records | two.records:
            difference = _tensor(one, two, path, progress)
            if difference is None:
                found.equal += 1
            else:
                found.tensors.append(difference)
        found.settings = _compare("config", _settings(one), _settings(two))
        for group in one.groups | two.groups:
            _sort_out(found, _compare(group, _flat(one.values(group)), _flat(two.values(group))))
        return found


def _sort_out(found: Diff, differences: list[ValueDifference]) -> None:
    """Add the differences of a group to the right lists."""
    for each in differences:
        about = each.place == layout.PROVENANCE or (each.place == "/" and each.name in _PROVENANCE)
        if about and each.name in VERSIONS:
            found.versions.append(each)
        elif about:
            if each.name != layout.DIGEST:  # follows from all the others
                found.provenance.append(each)
        elif each.place != layout.CONFIG:
            found.values.append(each)


def _tensor(one: Reader, two: Reader, path: str, progress: Progress | None) -> TensorDifference | None:
    a, b = one.records.get(path), two.records.get(path)
    names = (_described(a), _described(b))
    if a is None or b is None:
        return TensorDifference(path, "missing", *names)
    if a.shape != b.shape:
        return TensorDifference(path, "shape", *names)
    if a.dtype != b.dtype:
        return TensorDifference(path, "dtype", *names)
    return _values(a, zip(one.pieces(path), two.pieces(path), strict=True), names, progress)


def _described(record: Record | None) -> str | None:
    return None if record is None else f"{record.dtype} {shape_text(record.shape)}"


def _values(
    record: Record, pairs: Iterator[tuple[Array, Array]], names: Names, progress: Progress | None
) -> TensorDifference | None:
    elements = count = nonfinite = 0
    maximum, relative = None, None
    for a, b in pairs:
        elements += a.size
        if progress:
            progress(a.nbytes + b.nbytes)
        bits = f"u{a.itemsize}"
        unequal = a.view(bits) != b.view(bits)
        if not unequal.any():
            continue
        x, y = a[unequal], b[unequal]
        distance, scale = _distance(x, y, record.dtype)
        finite = np.isfinite(distance)
        count += x.size
        nonfinite += int(x.size - finite.sum())
        if finite.any():
            ratio = np.divide(distance, scale, out=np.zeros_like(distance), where=finite & (scale > 0))
            maximum = max(maximum or 0.0, float(distance[finite].max()))
            relative = max(relative or 0.0, float(ratio[finite].max()))
    if not count:
        return None
    return TensorDifference(record.path, "values", *names, elements, count, maximum, relative, nonfinite)


def _distance(x: Array, y: Array, dtype: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the distance of each pair and its larger magnitude; 64-bit integers are subtracted exactly."""
    a, b = as_floats(x, dtype), as_floats(y, dtype)
    with np.errstate(all="ignore"):
        scale = np.maximum(np.abs(a), np.abs(b))
        if x.dtype.kind in "iu" and dtype != "bfloat16":
            exact = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)
            return exact.astype(np.float64), scale
        return np.abs(a - b), scale


def _settings(reader: Reader) -> dict[str, str]:
    text = reader.values(layout.CONFIG).get("toml")
    if text is None:
        return {}
    try:
        return _flat(tomllib.loads(str(text)))
    except (tomllib.TOMLDecodeError, RecursionError):
        return {"toml": str(text)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values by dotted names, each as text that distinguishes 1, 1.0 and "1"."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            flat |= _flat({str(number): item for number, item in enumerate(value)}, f"{prefix}{name}.")
        else:
            flat[prefix + name] = repr(value)
    return flat


def _compare(place: str, one: Mapping[str, str], two: Mapping[str, str]) -> list[ValueDifference]:
    found = [ValueDifference(place, name, one.get(name), two.get(name)) for name in {**one, **two}]
    return [each for each in found if each.first != each.second]
