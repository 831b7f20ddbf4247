"""Keep two jobs out of one folder, without flock: clusters mount filesystems on which it does nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from hpctrain.errors import LockError
from hpctrain.log import logger

NAME = "lock.json"
PATIENCE = 2.0  # seconds that another job may take to write its lock, or to clear away a dead one
PAUSE = 0.02
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}


class FolderLock:
    """Hold a folder for one job: a file that only one process can put there.

    It is written under a private name and linked to its own, so that it is never seen half written, whenever its
    writer is killed; where a filesystem knows no links, it is created with ``O_CREAT | O_EXCL``.

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
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self._create()
            except FileExistsError:
                self._clear_stale(time.monotonic() > deadline)
                continue
            except OSError as error:
                raise LockError(f"cannot write to the run's folder {self.path.parent}: {error.strerror}") from error
            self._held = True
            return

    def release(self) -> None:
        """Give the lock back; one that somebody else has taken over stays."""
        if self._held and self._read() == self._own:
            self.path.unlink(missing_ok=True)
        self._held = False

    def _create(self) -> None:
        """Put the lock there whole; raise ``FileExistsError`` where there is one."""
        private = self.path.with_name(f".{NAME}.{self._own['host']}-{self._own['pid']}")
        private.unlink(missing_ok=True)
        try:
            self._write(private)
            os.link(private, self.path)
        except OSError as error:
            # A network filesystem may repeat a call that has succeeded, and then says that there is one.
            if isinstance(error, FileExistsError) and private.exists() and private.stat().st_nlink == 2:
                return
            if error.errno not in _NO_LINKS:
                raise
            self._write(self.path)
        finally:
            private.unlink(missing_ok=True)

    def _write(self, path: Path) -> None:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(self._own, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _clear_stale(self, late: bool) -> None:
        """Remove a lock whose holder is dead; raise ``LockError`` where it may be alive.

        A lock that cannot be read may be one that is just being written, so that is an error only when it is ``late``.
        """
        holder = self._read()
        if holder is None:
            if late and self.path.exists():
                raise LockError(f"cannot read {self.path}: if no job works in this folder, delete that file")
            time.sleep(PAUSE)
            return
        dead = self._is_dead(holder)
        if dead is None:
            raise LockError(
                f"job {holder.get('job_id') or 'without id'} on {holder.get('host')} (process {holder.get('pid')}, "
                f"since {holder.get('since')}) works in {self.path.parent}: give this run its own folder, "
                f"or delete {self.path} if that job is gone"
            )
        if self._remove(holder, late):
            logger.warning("took over the lock on %s: %s", self.path.parent, dead)

    def _remove(self, holder: dict[str, Any], late: bool) -> bool:
        """Remove the lock of this holder and no other; tell whether it was done here.

        Of several that found the same dead holder, one removes it; the others must not remove what that one then
        puts in its place. So the removal has a lock of its own, named after the dead holder, under which the holder is
        read again: whoever holds it knows that the lock is still the dead one's.
        """
        digest = hashlib.sha256(json.dumps(holder, sort_keys=True).encode()).hexdigest()[:16]
        mark = self.path.with_name(f".{NAME}.removing-{digest}")
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            if late:
                raise LockError(f"a job died while taking over {self.path}: delete that file and {mark}") from None
            time.sleep(PAUSE)
            return False
        except OSError as error:
            raise LockError(f"cannot write to the run's folder {self.path.parent}: {error.strerror}") from error
        try:
            if self._read() != holder:
                return False
            self.path.unlink()
            return True
        finally:
            mark.unlink(missing_ok=True)

    def _is_dead(self, holder: dict[str, Any]) -> str | None:
        """Return why the holder cannot be alive; None where it can."""
        if holder.get("host") == self._own["host"]:
            pid = holder.get("pid")
            started = process_started(pid) if isinstance(pid, int) else None
            if started is None or started != holder.get("started"):
                return f"its process {holder.get('pid')} on this host is no more"
            return None
        if self._own["job_id"] and holder.get("job_id") == self._own["job_id"]:
            return f"it is of this job's earlier run on {holder.get('host')}"
        return None


def process_started(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks since boot; None where none runs.

    The process id alone is not enough: after a reboot or a long day it belongs to somebody else. A zombie does not
    run, and in a container that collects no orphans it stays for good.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Fields 3 and 22; the second field is a name in brackets that may hold anything, brackets too.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
