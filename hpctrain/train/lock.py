"""Keep two jobs out of one folder, without flock: clusters mount filesystems on which it does nothing."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from hpctrain.errors import LockError
from hpctrain.log import logger

NAME = "lock.json"


class FolderLock:
    """Hold a folder for one job: a file that only one process can create (``O_CREAT | O_EXCL``).

    A lock that is left over is taken over at once where its holder can be told dead: by the same job id, which the
    scheduler gives to one run at a time, or by a process id of this host that is no more. Else the user is asked.
    """

    def __init__(self, folder: Path, job_id: str | None) -> None:
        self.path = folder / NAME
        self._own = {
            "job_id": job_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": process_started(os.getpid()),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._held = False

    def acquire(self) -> None:
        """Take the lock; raise ``LockError`` naming who holds it."""
        for _ in range(3):
            try:
                handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                self._clear_stale()
                continue
            except OSError as error:
                raise LockError(f"cannot write to the run's folder {self.path.parent}: {error.strerror}") from error
            with os.fdopen(handle, "w") as file:
                json.dump(self._own, file)
                file.flush()
                os.fsync(file.fileno())
            self._held = True
            return
        raise LockError(f"other jobs fight for {self.path}: give each its own folder")

    def release(self) -> None:
        """Give the lock back; one that somebody else has taken over stays."""
        if self._held and self._read() == self._own:
            self.path.unlink(missing_ok=True)
        self._held = False

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _clear_stale(self) -> None:
        """Remove a lock whose holder is dead; raise ``LockError`` where it may be alive."""
        holder = self._read()
        if holder is None:
            if not self.path.exists():
                return
            raise LockError(f"cannot read {self.path}: if no job works in this folder, delete that file")
        dead = self._is_dead(holder)
        if dead is None:
            raise LockError(
                f"job {holder.get('job_id') or 'without id'} on {holder.get('host')} (process {holder.get('pid')}, "
                f"since {holder.get('since')}) works in {self.path.parent}: give this run its own folder, "
                f"or delete {self.path} if that job is gone"
            )
        logger.warning("taking over the lock on %s: %s", self.path.parent, dead)
        # Moved aside under a name of our own first: of several that clear it, one finds it.
        aside = self.path.with_name(f".{NAME}.stale-{self._own['host']}-{self._own['pid']}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        aside.unlink(missing_ok=True)

    def _is_dead(self, holder: dict[str, Any]) -> str | None:
        """Return why the holder cannot be alive; None where it can."""
        if holder.get("host") == self._own["host"]:
            started = process_started(int(holder.get("pid") or 0))
            if started is None or started != holder.get("started"):
                return f"its process {holder.get('pid')} on this host is no more"
            return None
        if self._own["job_id"] and holder.get("job_id") == self._own["job_id"]:
            return f"it is of this job's earlier run on {holder.get('host')}"
        return None


def process_started(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks since boot; None where there is none.

    The process id alone is not enough: after a reboot or a long day it belongs to somebody else.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Field 22; the second field is a name in brackets that may hold anything, brackets too.
    return int(text.rpartition(")")[2].split()[19])
