"""Checkpoints of a folder: list, newest valid one, and retention policy.

The module loads h5py at first use: the settings of a run include the policy, and need no checkpoint.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpctrain.errors import CheckpointError, UsageError
from hpctrain.log import logger
from hpctrain.util.retry import TRANSIENT, retries
from hpctrain.util.text import short_repr

Best = Literal["lowest", "highest"]


@dataclass(frozen=True)
class RetentionPolicy:
    """Retention policy; a checkpoint is kept if any of its three rules keeps it.

    ``last`` is the number of newest checkpoints to keep. ``every`` is a number of steps: a
    checkpoint whose step is a multiple of it is kept (0: off). ``best`` names a value that the run
    logs: the checkpoint in whose step the value was ``lowest`` or ``highest`` is kept, the earliest
    among equal ones (empty: off).
    """

    last: int = 2
    every: int = 0
    best: str = ""
    which: Best = "lowest"

    def __post_init__(self) -> None:
        if self.last < 1:
            raise UsageError(f"cannot keep the last {self.last} checkpoints: keep at least 1")
        if self.every < 0:
            raise UsageError(f"cannot keep a checkpoint every {self.every} steps: give a number from 0")
        if self.which not in ("lowest", "highest"):
            raise UsageError(f"cannot keep the checkpoint with the {self.which} value: allowed are lowest, highest")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint to keep or delete; ``value`` selects the best, ``None`` if it was not logged."""

    name: str
    step: int
    value: float | None = None


def superseded(candidates: Sequence[StoredCheckpoint], keep: RetentionPolicy) -> list[StoredCheckpoint]:
    """Return the candidates that no rule keeps, oldest first."""
    ordered = sorted(candidates, key=lambda one: one.step)
    staying = {one.name for one in ordered[-keep.last :]}
    staying |= {one.name for one in ordered if keep.every and one.step % keep.every == 0}
    best = best_of(ordered, keep.which) if keep.best else None
    return [one for one in ordered if one.name not in staying and one is not best]


def best_of(candidates: Sequence[StoredCheckpoint], which: Best = "lowest") -> StoredCheckpoint | None:
    """Return the earliest candidate with the best value; candidates without a finite value are ignored."""
    valued = [one for one in candidates if one.value is not None and math.isfinite(one.value)]
    sign = 1 if which == "lowest" else -1
    return min(valued, key=lambda one: (sign * (one.value or 0.0), one.step), default=None)


# Folder of checkpoints ------------------------------------------------------------------------------------------------


LOGGED = "logged"  # in /train: the values that the run logged in the step of the file, by name
KEEP_BEST, BEST = "keep_best", "best"  # in /train: the value that selects the best checkpoint; "lowest" or "highest"
_STEP_FILE = re.compile(r"step_(\d+)\.h5")
_LEFTOVER = re.compile(r"\.step_\d+\.h5\.tmp-.+")


def step_of(name: str) -> int | None:
    """Return the step in a file name such as ``step_00001200.h5``; ``None`` for the name of another file."""
    match = _STEP_FILE.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Return the files named ``step_*.h5`` in a folder, oldest step first; an empty list for a missing folder."""
    try:
        names = retries.call(os.listdir, folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look into {folder}: {error.strerror}") from error
    steps = sorted((step, name) for name in names if (step := step_of(name)) is not None)
    return [Path(folder) / name for _, name in steps]


def newest_valid(folder: str | Path, *, strict: bool = False) -> Path | None:
    """Return the newest valid checkpoint, in which every byte is as written; ``None`` if the folder has no checkpoint.

    A damaged checkpoint is named in a warning, and the previous one is tried; with ``strict`` it
    raises ``CheckpointError``. If all checkpoints are damaged, ``CheckpointError`` is raised too:
    only the user may decide to start again from step 0.
    """
    files = list_checkpoints(folder)
    for path in reversed(files):
        try:
            _verify(path)
            return path
        except CheckpointError as error:
            if strict:
                raise
            logger.warning("checkpoint %s is not used: %s", path, error)
    if files:
        raise CheckpointError(
            f"none of the {len(files)} checkpoints in {folder} is valid: hpctrain checkpoint verify says why, "
            "move them away to start again"
        )
    return None


def _verify(path: Path) -> None:
    """Verify a file; retry transient faults, which must not cost the steps since the previous checkpoint."""
    found: list[CheckpointError] = []

    def verify() -> None:
        try:
            verify_named(path)
        except CheckpointError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in TRANSIENT:
                raise
            found.append(error)
            raise OSError(error.__cause__.errno, error.__cause__.strerror, str(path)) from error

    try:
        retries.call(verify)
    except CheckpointError:
        raise
    except OSError:
        raise found[-1] from None


def verify_named(path: Path) -> None:
    """Raise ``CheckpointError`` unless every byte of a file is as written and its step is the one in its name.

    A copy under another name would be resumed from as the newest checkpoint, and would be kept
    longer than newer ones.
    """
    from hpctrain.checkpoint.format.reader import Reader

    with Reader(path) as reader:
        reader.verify()
        held, named = reader.root.get("step"), step_of(path.name)
    if named is not None and held is not None and held != named:
        step = short_repr(held)
        raise CheckpointError(f"{path} holds step {step}, its name says {named}: rename it, or move it away")


def keep_last(folder: str | Path, count: int, *, verified: Path | None = None) -> list[Path]:
    """Delete the oldest checkpoints except the last ``count``, and return the deleted paths.

    If the newest checkpoint is damaged, no file is deleted. ``verified`` names a file that was just
    committed and is not verified again.
    """
    return Retention(folder, RetentionPolicy(last=count)).apply(verified=verified)


class Retention:
    """Retention: deletes the checkpoints of a folder that a policy does not keep.

    The value that selects the best checkpoint is read from the files themselves, so it survives
    every restart. Each file is read once.
    """

    def __init__(
        self, folder: str | Path, policy: RetentionPolicy, read: Callable[[Path], Mapping[str, float]] | None = None
    ) -> None:
        """Apply ``policy`` to a folder; ``read`` returns the logged values of a file."""
        self.folder, self.policy, self._read = Path(folder), policy, read or logged_values
        self._values: dict[tuple[str, int, int], float | None] = {}

    def apply(self, *, verified: Path | None = None) -> list[Path]:
        """Delete the checkpoints that the policy does not keep, and return their paths.

        If the newest checkpoint is damaged, no file is deleted. ``verified`` names a file that was
        just committed and is not verified again. If the policy keeps the best checkpoint, a file
        that cannot be read is kept: it may be the best one.
        """
        files = list_checkpoints(self.folder)
        if len(files) <= self.policy.last:
            return []
        old = superseded(self._candidates(files), self.policy)
        if not old or not _is_valid(files[-1], verified):
            return []
        return [path for one in old if _delete(path := self.folder / one.name)]

    def best(self) -> Path | None:
        """Return the checkpoint with the best value; ``None`` if the policy keeps no best or no file has a value."""
        if not self.policy.best:
            return None
        found = best_of(self._candidates(list_checkpoints(self.folder)), self.policy.which)
        return self.folder / found.name if found else None

    def _candidates(self, files: list[Path]) -> list[StoredCheckpoint]:
        found = []
        for path in files:
            step = step_of(path.name)
            assert step is not None, "only such files are listed"
            try:
                found.append(StoredCheckpoint(path.name, step, self._value(path) if self.policy.best else None))
            except CheckpointError as error:
                logger.warning("%s is kept: cannot determine whether it is the best: %s", path, error)
        return found

    def _value(self, path: Path) -> float | None:
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        identity = (path.name, status.st_ino, status.st_mtime_ns)
        if identity not in self._values:
            self._values[identity] = self._read(path).get(self.policy.best)
        return self._values[identity]


def logged_values(path: Path) -> dict[str, float]:
    """Return the numbers that the run logged in the step of a file. Raises ``CheckpointError`` if it is damaged."""
    from hpctrain.checkpoint.format.reader import Reader

    with Reader(path) as reader:
        return logged_in(reader.values("/train"))


def logged_in(train: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that the run logged in the step of a file, given the values of its ``/train``."""
    logged = train.get(LOGGED)
    known = logged.items() if isinstance(logged, dict) else ()
    return {str(name): value for name, value in known if isinstance(value, float)}


def _is_valid(newest: Path, verified: Path | None) -> bool:
    if verified is not None and verified.name == newest.name:
        return True
    try:
        verify_named(newest)
    except CheckpointError as error:
        logger.warning("older checkpoints are kept: the newest is not valid: %s", error)
        return False
    return True


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Delete the private files that killed writers left behind; only for the process that holds the folder's lock."""
    try:
        entries = sorted(Path(folder).iterdir())
    except FileNotFoundError:
        return []
    return [path for path in entries if _LEFTOVER.fullmatch(path.name) and _delete(path)]


def _delete(path: Path) -> bool:
    try:
        retries.call(os.unlink, path)
    except OSError as error:
        logger.warning("cannot delete %s: %s", path, error.strerror)
        return False
    return True
