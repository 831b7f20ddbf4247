"""Lock of a run's folder, without flock: clusters mount filesystems on which that does nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from hpctrain.errors import LockError
from hpctrain.log import logger
from hpctrain.train.lock_holder import identity, why_over
from hpctrain.util import atomic
from hpctrain.util.claim import Claim
from hpctrain.util.reading import read_json
from hpctrain.util.retry import retries

NAME = "lock.json"
PATIENCE = 2.0  # seconds that another job may take to write its lock, or to clear away a dead one
PAUSE = 0.02
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}


class FolderLock:
    """Lock of a folder for one job: a file that only one process can put there.

    It is written under a private name and linked to its own, so that it is never seen half written, whenever its
    writer is killed; where a filesystem knows no links, it is created with ``O_CREAT | O_EXCL``.

    A lock that is left over is taken over at once if its holder has ended for certain, or is an earlier start of the
    same job or chain of jobs; see ``lock_holder``. Otherwise the user is asked. The holder calls ``check`` before it
    writes.
    """

    def __init__(self, folder: Path, job_id: str | None) -> None:
        self.path = folder / NAME
        self._own = identity(job_id)
        self.held = False

    def acquire(self) -> None:
        """Take the lock; raise ``LockError`` naming who holds it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                retries.call(self._create)
            except FileExistsError:
                self._clear_stale(time.monotonic() > deadline)
                continue
            except OSError as error:
                raise LockError(f"cannot write to the run's folder {self.path.parent}: {error.strerror}") from error
            self.held = True
            return

    @property
    def claim(self) -> Claim:
        """Return what those who write into the folder check before."""
        return Claim(str(self.path), self._own["token"])

    def check(self) -> None:
        """Raise ``LockError`` if another start has taken the folder over; then nothing may be written any more."""
        if self.held:
            self.claim.check()

    def release(self) -> None:
        """Give the lock back; one that somebody else has taken over stays."""
        if self.held and self._read() == self._own:
            try:
                retries.call(os.unlink, self.path)
            except OSError as error:  # the next start finds its holder ended
                logger.warning("cannot delete %s: %s", self.path, error.strerror)
        self.held = False

    def _create(self) -> None:
        """Put the lock there whole; raise ``FileExistsError`` where there is one."""
        private = atomic.private_name(self.path)
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
        handle = atomic.create(path, 0o644)
        try:
            os.write(handle, json.dumps(self._own).encode())  # less than a page: in one piece or not at all
            os.fsync(handle)
        except OSError:
            atomic.discard(path)
            raise
        finally:
            os.close(handle)

    def _read(self) -> dict[str, Any] | None:
        try:
            found = retries.call(read_json, self.path, 64 * 1024)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _clear_stale(self, late: bool) -> None:
        """Remove a lock whose holder is dead; raise ``LockError`` where it may be alive.

        A lock that cannot be read may be one that is just being written, so that is an error only when it is ``late``.
        """
        holder = self._read()
        if holder is None:
            if late and os.path.lexists(self.path):  # a link that leads nowhere is there, too
                raise LockError(f"cannot read {self.path}: if no job works in this folder, delete that file")
            time.sleep(PAUSE)
            return
        over = why_over(holder, self._own)
        if over is None:
            raise LockError(
                f"job {holder.get('job_id') or 'without id'} on {holder.get('host')} (process {holder.get('pid')}, "
                f"since {holder.get('since')}) works in {self.path.parent}: give this run its own folder, "
                f"or delete {self.path} if that job is gone"
            )
        if self._remove(holder, late):
            logger.warning("took over the lock on %s: %s", self.path.parent, over)

    def _remove(self, holder: dict[str, Any], late: bool) -> bool:
        """Remove the lock of this holder and no other; tell whether it was done here.

        Of several that found the same dead holder, one removes it; the others must not remove what that one then
        puts in its place. So the removal has a lock of its own, named after the dead holder, under which the holder is
        read again: whoever holds it knows that the lock is still the dead one's.
        """
        digest = hashlib.sha256(json.dumps(holder, sort_keys=True).encode()).hexdigest()[:16]
        mark = self.path.with_name(f".{NAME}.removing-{digest}")
        try:
            os.close(atomic.create(mark, 0o644))
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
