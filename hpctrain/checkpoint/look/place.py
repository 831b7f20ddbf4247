"""Checkpoints in a run's folder: the newest valid one, all of them, and the best by a value that the run logged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.file import layout
from hpctrain.checkpoint.file.reader import Reader
from hpctrain.checkpoint.folder import BEST, KEEP_BEST, LOGGED, list_checkpoints, newest_valid
from hpctrain.checkpoint.keep import Best, Candidate, best_of
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
    if not Path(path).is_dir():
        return Path(path)
    found = newest_valid(folder_of(path))
    if found is None:
        raise UsageError(f"{path} is a folder that holds no checkpoint; give a step_*.h5 file or the folder of a run")
    return found


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
    names = ", ".join(sorted({one for found in facts.values() for one in _logged(found)})) or "no numbers"
    if not name:
        raise UsageError(
            f"{run}: its checkpoints do not say which is the best (the run had no keep_best); name a number with by= "
            f"or --by; they hold {names}"
        )
    judged: Best = known or "lowest"
    candidates = [
        Candidate(str(path), layout.step_of(path.name) or 0, _logged(found).get(name)) for path, found in facts.items()
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


def _logged(facts: dict[str, Any]) -> dict[str, float]:
    found = facts.get(LOGGED, {})
    known = found.items() if isinstance(found, dict) else ()
    return {str(name): value for name, value in known if isinstance(value, float) and math.isfinite(value)}
