"""Checkpoints of a run's folder: the newest valid one, all of them, and the best by a number that the run logged."""

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
    """Best checkpoint of a run; ``by`` names the number that decides, ``which`` value of it is the best."""

    file: str
    step: int
    by: str
    which: Best
    value: float


def folder_of(run: str | Path) -> Path:
    """Return the folder with the checkpoints of a run; a folder without ``checkpoints`` in it is that itself."""
    inner = Path(run) / "checkpoints"
    return inner if inner.is_dir() else Path(run)


def newest_of(path: str | Path) -> Path:
    """Return a checkpoint: the path itself, or the newest valid one if it is the folder of a run.

    Every byte of that one is read. Raises ``UsageError`` for a folder without checkpoints, ``CheckpointError`` if none
    of them is valid.
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

    ``run`` is the folder of a run. The number that decides is the one that the run keeps its best checkpoint for
    (``keep_best``, ``run.save(best=...)``), or ``by``, a number that it logged; ``which`` is ``"lowest"`` or
    ``"highest"``, without it as the run has it, else the lowest. Damaged files are left out. Any process may call this
    alone; it needs neither torch nor MPI.

    Raises ``UsageError`` if the folder holds no checkpoint, if nothing says which is the best, or if no file has the
    number.
    """
    if not Path(run).exists():
        raise UsageError(f"no folder {run}: give the folder of a run, as checkpoints= of job.run or run.folder")
    return Path(judge(run, by, which).file)


def judge(run: str | Path, by: str = "", which: Best | None = None) -> Judged:
    """Return the best checkpoint of a run, by what its newest file says (``keep_best``), or by a name that is given.

    Damaged files are left out. Raises ``UsageError`` if nothing says by what, or if no file has the number.
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
    """Return the values of ``/train``; None for a damaged file."""
    try:
        with Reader(path) as reader:
            return reader.values(layout.TRAIN)
    except CheckpointError:
        return None


def _logged(facts: dict[str, Any]) -> dict[str, float]:
    found = facts.get(LOGGED, {})
    known = found.items() if isinstance(found, dict) else ()
    return {str(name): value for name, value in known if isinstance(value, float) and math.isfinite(value)}
