"""Put a checkpoint in its place whole or not at all.

Note: the commit. The file is written under a private name beside its target, what was written is read back and
compared, and flushed to the disk; only then is it renamed, and the folder flushed. After any error the private file is
removed and never promoted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from hpctrain.checkpoint.file.reader import verify_file
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.util import atomic

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def commit(path: Path, write: Callable[[Path], None], needed: int) -> None:
    """Let ``write`` make a file under a private name, verify it and rename it to ``path``.

    ``needed`` is the number of bytes to write, for the error message of a full disk. Raises ``CheckpointError``
    that says why; what was at ``path`` before is then still there.
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
    """Make the folder of a checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)


def flush_folder(path: Path) -> None:
    """Make the rename last; by now the new file is complete and in its place, whatever happens here."""
    try:
        atomic.flush_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path} was written and verified, but its folder could not be flushed ({error.strerror}): "
            "it may be gone after a power failure"
        ) from error


def explained(error: Exception, path: Path, temporary: Path, needed: int) -> Exception:
    """Return the ``CheckpointError`` that says why a file cannot be written; ``needed`` is its number of bytes.

    What the private file takes counts as free: it is about to be removed.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, HpctrainError) and number is None:
        if not isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"cannot write {path}: {error}")
    reason = os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__
    if number in _NO_SPACE:
        free = _free_bytes(temporary)
        room = "an unknown number of" if free is None else str(free)
        reason += f": {needed} bytes are needed, {room} bytes are free in {path.parent}"
    return CheckpointError(f"cannot write {path}: {reason.lower() if number else reason}")


def _free_bytes(temporary: Path) -> int | None:
    """Return the bytes that there were to write into."""
    try:
        status = os.statvfs(temporary.parent)
    except OSError:
        return None
    try:
        taken = temporary.stat().st_blocks * 512
    except OSError:
        taken = 0
    return status.f_bavail * status.f_frsize + taken
