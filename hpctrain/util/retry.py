"""Retries of file system calls after transient faults, with growing pauses, a limit and a counter."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.errors import FileSystemError, HpctrainError, UsageError

T = TypeVar("T")

logger = logging.getLogger("hpctrain")

VARIABLE = "HPCTRAIN_FILE_PATIENCE"
PATIENCE = 15.0  # seconds: a failover of a file server takes about ten
_FIRST, _LONGEST = 0.05, 1.0  # seconds of a pause
# ESTALE: the server has lost a handle. EIO, ETIMEDOUT and similar: a connection or a server is
# down. ENOSPC and EDQUOT: space may be freed soon. EINTR and EAGAIN: the call must be repeated.
TRANSIENT = {
    getattr(errno, name)
    for name in "EIO ESTALE ENOSPC EDQUOT EINTR EAGAIN ETIMEDOUT EREMOTEIO ENOLINK ECOMM EHOSTDOWN ENOTCONN".split()
    if hasattr(errno, name)
}
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Retries:
    """Repeater of calls. ``count`` and ``seconds`` are totals of the process, ``last`` is the last error."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.last = ""

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function until it succeeds, at most for ``patience()`` seconds. Raises its last ``OSError``.

        The function must be safe to repeat. ``fsync`` is not: after a failure, a second ``fsync``
        succeeds although the data is lost.
        """
        began, pause = time.monotonic(), _FIRST
        while True:
            try:
                return function(*arguments)
            except OSError as error:
                if error.errno not in TRANSIENT or time.monotonic() - began + pause > patience():
                    raise
                where = f" of {error.filename}" if error.filename else ""
                self.note((error.strerror or str(error)).lower(), pause, where)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)

    def note(self, reason: str, pause: float, where: str = "") -> None:
        """Count a call that is about to be repeated; the first one logs a warning."""
        self.last = reason
        if not self.count:
            text = "a call%s failed: %s; such calls are repeated for %g s (%s), the receipt counts them"
            logger.warning(text, where, reason, patience(), VARIABLE)
        self.count += 1
        self.seconds += pause

    def facts(self, before: tuple[int, float] = (0, 0.0)) -> dict[str, Any]:
        """Return the facts for a receipt since ``count`` and ``seconds`` were ``before``; empty without retries."""
        count, seconds = self.count - before[0], self.seconds - before[1]
        if not count:
            return {}
        return {"retried_calls": count, "retried_seconds": round(seconds, 3), "retried_reason": self.last}


def patience() -> float:
    """Return the seconds for which a call is repeated: ``HPCTRAIN_FILE_PATIENCE`` if a number, else the default."""
    try:
        return max(float(os.environ[VARIABLE]), 0.0)
    except (KeyError, ValueError):
        return PATIENCE


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a system error within the block as the error of ``cannot_write``, which names the file."""
    try:
        yield
    except HpctrainError:
        raise
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> HpctrainError:
    """Return the error for a file that cannot be written; if the disk is full, it tells the free bytes.

    A fault that may end is a ``FileSystemError``: a later start may succeed. Anything else, such as
    a folder in place of the file, is a ``UsageError``.
    """
    reason = (error.strerror or str(error)).lower()
    folder = next((each for each in path.parents if each.exists()), path.parent)
    if error.errno in NO_SPACE and (free := free_bytes(folder)) is not None:
        reason += f", {free} bytes are free in {folder}"
    if error.errno not in TRANSIENT:
        return UsageError(f"cannot write {path}: {reason}")
    tried = f"calls were repeated for {patience():g} s"
    return FileSystemError(f"cannot write {path}: {reason}; {tried}; start again when the file system works")


def free_bytes(folder: str | Path) -> int | None:
    """Return the bytes that this user can still write into a folder; None if the file system does not tell."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


retries = Retries()
