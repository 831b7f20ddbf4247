"""Inspection of checkpoints: contents of a folder or a file, validity, and the best file of a run.

It runs on a login node with h5py and NumPy, without torch and MPI. All results are plain
dataclasses; the command line formats them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import Record, group_of, keys_in
from hpctrain.checkpoint.format.reader import Reader, verify_file
from hpctrain.checkpoint.retention import (
    BEST,
    KEEP_BEST,
    Best,
    StoredCheckpoint,
    best_of,
    list_checkpoints,
    logged_in,
    newest_valid,
    step_of,
)
from hpctrain.checkpoint.tools.curves import as_floats, read_curve, read_curves
from hpctrain.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class Judged:
    """Best checkpoint of a run; ``by`` names the value that decides, ``which`` is "lowest" or "highest"."""

    file: str
    step: int
    by: str
    which: Best
    value: float


def folder_of(run: str | Path) -> Path:
    """Return the folder with the checkpoints of a run; the folder itself if it has no ``checkpoints`` folder."""
    inner = Path(run) / "checkpoints"
    return inner if inner.is_dir() else Path(run)


def newest_of(path: str | Path) -> Path:
    """Return a checkpoint: the path itself, or the newest valid one if the path is the folder of a run.

    Every byte of that checkpoint is read. Raises ``UsageError`` for a folder without checkpoints,
    ``CheckpointError`` if all of them are damaged.
    """
    *_, newest = all_of(path)
    return newest_valid(newest.parent) or newest if Path(path).is_dir() else newest


def all_of(path: str | Path) -> list[Path]:
    """Return the checkpoints of a run's folder, oldest first, or the file itself."""
    if not Path(path).is_dir():
        return [Path(path)]
    found = list_checkpoints(folder_of(path))
    if not found:
        raise UsageError(f"{path} is a folder that holds no checkpoint; give a step_*.h5 file or the folder of a run")
    return found


def best(run: str | Path, *, by: str = "", which: Best | None = None) -> Path:
    """Return the path of a run's best checkpoint, as ``hpctrain checkpoint best`` prints it.

    ``run`` is the folder of a run. ``by`` is a number that the run logged; by default it is the one
    for which the run keeps its best checkpoint (``keep_best``, ``run.save(best=...)``). ``which``
    is ``"lowest"`` or ``"highest"``; by default it is the choice of the run, else ``"lowest"``.
    Damaged files are ignored. Any process may call this alone; it needs neither torch nor MPI.

    Raises ``UsageError`` if the folder has no checkpoint, if no number is defined by which to
    choose, or if no file has the number.
    """
    if not Path(run).exists():
        raise UsageError(f"no folder {run}: give the folder of a run, as checkpoints= of job.run or run.folder")
    return Path(judge(run, by, which).file)


def judge(run: str | Path, by: str = "", which: Best | None = None) -> Judged:
    """Return the best checkpoint of a run, by the ``keep_best`` of its newest file, or by a given name.

    Damaged files are ignored. Raises ``UsageError`` if no name is defined, or if no file has the
    value.
    """
    if which not in (None, "lowest", "highest"):
        raise UsageError(f"which = {which!r}: allowed are 'lowest' and 'highest'")
    files = all_of(run)
    facts = {path: found for path in files if (found := _facts(path)) is not None}
    name, known = by, which
    for found in reversed(facts.values()):
        if not name and found.get(KEEP_BEST):
            name = str(found[KEEP_BEST])
        if known is None and found.get(KEEP_BEST) == name and found.get(BEST) in ("lowest", "highest"):
            known = found[BEST]
    logged = {path: logged_in(found) for path, found in facts.items()}
    finite = {one for values in logged.values() for one, value in values.items() if math.isfinite(value)}
    names = ", ".join(sorted(finite)) or "no numbers"
    if not name:
        raise UsageError(
            f"{run}: its checkpoints do not say which is the best (the run had no keep_best); choose one of "
            f"{names} by --by NAME (in Python: by=NAME)"
        )
    judged: Best = known or "lowest"
    candidates = [
        StoredCheckpoint(str(path), step_of(path.name) or 0, values.get(name)) for path, values in logged.items()
    ]
    chosen = best_of(candidates, judged)
    if chosen is None or chosen.value is None:
        raise UsageError(f"{run}: no checkpoint holds a finite number called {name!r}; they hold {names}")
    return Judged(chosen.name, chosen.step, name, judged, chosen.value)


def _facts(path: Path) -> dict[str, Any] | None:
    """Return the values of ``/train``; ``None`` for a damaged file."""
    try:
        with Reader(path) as reader:
            return reader.values(layout.TRAIN)
    except CheckpointError:
        return None


Progress = Callable[[int], object]


@dataclass(frozen=True)
class Entry:
    """A file of a folder; ``error`` is the reason if nothing more is known."""

    file: str
    bytes: int
    step: int | None = None
    created: str | None = None
    world_size: int | None = None
    loss: float | None = None
    best: bool = False  # by the value for which the run keeps its best checkpoint
    by: str | None = None  # name of that value; ``value`` is the one logged in the step of the file
    value: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class TensorStats:
    """A tensor and statistics of its finite values; ``nonfinite`` counts the others, ``values`` lists few elements."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    minimum: float | None
    maximum: float | None
    norm: float | None
    nonfinite: int
    values: list[float] | None = None


@dataclass(frozen=True)
class Contents:
    """Contents of a file: attributes of its root, its groups of values, its curves and its tensors."""

    file: str
    bytes: int
    root: dict[str, Any]
    provenance: dict[str, Any]
    train: dict[str, Any]
    config: str | None
    curves: dict[str, list[float]]
    tensors: list[TensorStats]
    fingerprint: str  # of all models and optimizers
    frozen: str | None = None  # fingerprint of the frozen parameters, if the file holds only the trained ones


@dataclass(frozen=True)
class Verification:
    """Result of a verification; ``error`` is the damage if ``ok`` is false."""

    file: str
    ok: bool
    error: str | None = None


def ls(folder: str | Path) -> list[Entry]:
    """Return the checkpoints of a folder, or of the ``checkpoints`` folder of a run, oldest first.

    Their structure and the curve of the loss are checked, the bytes of the tensors are not. The
    best one is marked if the run keeps its best checkpoint.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: give a run's folder or one with step_*.h5 files")
    entries = [_entry(path) for path in list_checkpoints(folder_of(folder))]
    try:
        chosen = judge(folder).file
    except UsageError:  # no value is defined by which to choose
        return entries
    return [replace(entry, best=entry.file == chosen) for entry in entries]


def show(file: str | Path, name: str | None = None, progress: Progress | None = None) -> Contents:
    """Return the contents of a file, or of a name in it (a path, a tensor of the model, a parameter of the optimizer).

    Reads the tensors that it describes. Raises ``CheckpointError`` if one of them is damaged.
    """
    with Reader(file) as reader:
        toml = reader.values(layout.CONFIG).get("toml")
        return Contents(
            file=str(file),
            bytes=reader.size,
            root=reader.root,
            provenance=reader.values(layout.PROVENANCE),
            train=reader.values(layout.TRAIN),
            config=None if toml is None else str(toml),
            curves=read_curves(reader),
            tensors=[_stats(reader, record, name is not None, progress) for record in _chosen(reader, name)],
            fingerprint=reader.fingerprint,
            frozen=reader.values(layout.MODEL).get(layout.FROZEN),
        )


def verify(file: str | Path, progress: Progress | None = None) -> Verification:
    """Read every byte of a file and return whether it is valid."""
    try:
        verify_file(file, progress)
    except CheckpointError as error:
        return Verification(str(file), False, str(error))
    return Verification(str(file), True)


def _entry(path: Path) -> Entry:
    try:
        size = path.stat().st_size
        with Reader(path) as reader:
            root, curve = reader.root, f"{layout.TRAIN}/loss"
            loss = read_curve(reader, curve, 1) if curve in reader.records else []
            facts = reader.values(layout.TRAIN)
    except (CheckpointError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        return Entry(str(path), size, step_of(path.name), error=str(error))
    by = str(facts[KEEP_BEST]) if facts.get(KEEP_BEST) else None
    return Entry(
        file=str(path),
        bytes=size,
        step=root.get("step"),
        created=root.get("created"),
        world_size=root.get("world_size"),
        loss=loss[-1] if loss else None,
        by=by,
        value=logged_in(facts).get(by or ""),
    )


def _chosen(reader: Reader, name: str | None) -> Sequence[Record]:
    """Return the tensors that a name selects; without a name, all but the curves, which are returned separately."""
    if name is None:
        return [record for path, record in reader.records.items() if not path.startswith(f"{layout.TRAIN}/")]
    path = "/" + name.strip("/")
    starts = [path, *(group + path for group in _groups(reader))]
    chosen = [
        record
        for record in reader.records.values()
        if any(record.path == start or record.path.startswith(f"{start}/") for start in starts)
    ]
    if not chosen:
        known = [*reader.records, *reader.below(layout.MODEL)]
        close = difflib.get_close_matches(name.strip("/"), [each.strip("/") for each in known], n=1, cutoff=0.5)
        guess = f": did you mean {close[0]}?" if close else ""
        raise UsageError(f"{reader.path} holds no tensor {name!r}{guess}, hpctrain checkpoint show FILE lists all")
    return chosen


def _groups(reader: Reader) -> list[str]:
    """Return the groups to which a name may be relative, including those of each model and of each optimizer."""
    models = [group_of(layout.MODEL, key) for key in keys_in(reader, layout.MODEL)]
    optimizers = [group_of(layout.OPTIMIZER, key) for key in keys_in(reader, layout.OPTIMIZER)]
    below = [group_of(root, key) for root in optimizers for key in keys_in(reader, layout.MODEL)]
    return list(dict.fromkeys([layout.MODEL, layout.OPTIMIZER, layout.TRAIN, *models, *optimizers, *below]))


def _stats(reader: Reader, record: Record, with_values: bool, progress: Progress | None) -> TensorStats:
    low, high, squares, nonfinite = math.inf, -math.inf, 0.0, 0
    few = with_values and math.prod(record.shape) <= 16
    values: list[float] = []
    for piece in reader.pieces(record.path):
        numbers = as_floats(piece, record.dtype)
        if few:
            values = numbers.tolist()
        finite = numbers[np.isfinite(numbers)]
        nonfinite += numbers.size - finite.size
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            squares += float(np.dot(finite, finite))
        if progress:
            progress(piece.nbytes)
    some = low <= high
    return TensorStats(
        path=record.path,
        shape=record.shape,
        dtype=record.dtype,
        bytes=record.nbytes,
        minimum=low if some else None,
        maximum=high if some else None,
        norm=math.sqrt(squares) if some else None,
        nonfinite=nonfinite,
        values=values if few else None,
    )
