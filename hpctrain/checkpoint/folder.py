"""Look after a folder of checkpoints: list them, find the newest that is sound, keep the last few."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.checkpoint import layout
from hpctrain.checkpoint.reader import verify_file
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.log import logger

_LEFTOVER = re.compile(r"\.step_\d+\.h5\.tmp-.+")


def list_checkpoints(folder: str | Path) -> list[Path]:
    """Return the files named ``step_*.h5`` in a folder, oldest step first; none where there is no folder."""
    try:
        names = [entry.name for entry in Path(folder).iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look into {folder}: {error.strerror}") from error
    steps = sorted((step, name) for name in names if (step := layout.step_of(name)) is not None)
    return [Path(folder) / name for _, name in steps]


def newest_valid(folder: str | Path, *, strict: bool = False) -> Path | None:
    """Return the newest checkpoint of which every byte is as written, ``None`` where the folder holds none at all.

    A damaged one is named in a warning and the one before it tried; with ``strict`` it raises ``CheckpointError``.
    Files that are all damaged raise it too: starting again from step 0 is for the user to decide.
    """
    files = list_checkpoints(folder)
    for path in reversed(files):
        try:
            verify_file(path)
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


def keep_last(folder: str | Path, count: int, *, verified: Path | None = None) -> list[Path]:
    """Delete the oldest checkpoints but for the last ``count`` and return what was deleted.

    Nothing is deleted unless the newest is sound; ``verified`` names a file that was just committed and so needs no
    second look.
    """
    if count < 1:
        raise UsageError(f"cannot keep the last {count} checkpoints: keep at least 1")
    files = list_checkpoints(folder)
    old = files[:-count]
    if not old:
        return []
    if verified is None or verified.name != files[-1].name:
        try:
            verify_file(files[-1])
        except CheckpointError as error:
            logger.warning("older checkpoints are kept: the newest is not valid: %s", error)
            return []
    return [path for path in old if _delete(path)]


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Delete what killed writers left under private names; only for who holds the lock of the folder."""
    try:
        entries = sorted(Path(folder).iterdir())
    except FileNotFoundError:
        return []
    return [path for path in entries if _LEFTOVER.fullmatch(path.name) and _delete(path)]


def _delete(path: Path) -> bool:
    try:
        path.unlink()
    except OSError as error:
        logger.warning("cannot delete %s: %s", path, error.strerror)
        return False
    return True
