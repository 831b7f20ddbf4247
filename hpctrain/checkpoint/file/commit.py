"""Atomic commit of a checkpoint file.

Note: the commit. The file is written under a private name in the folder of its target. The written
bytes are read back, compared, and flushed to the disk. Only then is the file renamed, and the
folder flushed. After any error the private file is removed, and is never renamed to the target.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hpctrain.checkpoint.file.reader import verify_file
from hpctrain.errors import CheckpointError, CheckpointFaultError, HpctrainError
from hpctrain.util import atomic
from hpctrain.util.retry import NO_SPACE, PASSING, free_bytes, retries


def commit(path: Path, write: Callable[[Path], None], needed: int) -> None:
    """Create a file by ``write`` under a private name, verify it and rename it to ``path``.

    ``needed`` is the number of bytes to write, for the error message of a full disk. Raises
    ``CheckpointError`` with the reason; a previous file at ``path`` then still exists.
    """
    temporary = atomic.private_name(path)
    try:
        prepare(path)
        write(temporary)
        verify_file(temporary)
        atomic.put(temporary, path)
    except Exception as error:
        said = explained(error, path, temporary, needed)
        atomic.discard(temporary)
        raise said from error
    except BaseException:
        atomic.discard(temporary)
        raise
    flush_folder(path)


def prepare(path: Path) -> None:
    """Create the folder of a checkpoint."""
    retries.call(lambda: path.parent.mkdir(parents=True, exist_ok=True))


def flush_folder(path: Path) -> None:
    """Make the rename durable. The new file is complete under its name by now, even if this raises."""
    try:
        retries.call(atomic.flush_folder, path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} was written and verified, but its folder could not be flushed ({error.strerror}): "
            "it may be gone after a power failure"
        ) from error


def explained(error: Exception, path: Path, temporary: Path, needed: int) -> Exception:
    """Return the ``CheckpointError`` with the reason why a file cannot be written; ``needed`` is its number of bytes.

    The bytes of the private file count as free, because it is about to be removed.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, HpctrainError) and number is None:
        if not isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"cannot write {path}: {error}")
    reason = os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__
    if number in NO_SPACE:
        free = _free_bytes(temporary)
        room = "an unknown number of" if free is None else str(free)
        reason += f": {needed} bytes are needed, {room} bytes are free in {path.parent}"
    kind = CheckpointFaultError if number in PASSING else CheckpointError
    return kind(f"cannot write {path}: {reason.lower() if number else reason}")


def _free_bytes(temporary: Path) -> int | None:
    """Return the bytes that were free before the private file was written."""
    free = free_bytes(temporary.parent)
    if free is None:
        return None
    try:
        taken = temporary.stat().st_blocks * 512
    except OSError:
        taken = 0
    return free + taken
