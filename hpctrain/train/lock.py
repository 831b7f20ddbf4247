"""Lock of a run folder, without flock: some filesystems on clusters ignore flock."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError, LockError
from hpctrain.log import logger
from hpctrain.train.lock_holder import identity, why_over
from hpctrain.util import atomic
from hpctrain.util.claim import Claim
from hpctrain.util.reading import read_json
from hpctrain.util.retry import PASSING, cannot_write, retries

NAME = "lock.json"
PATIENCE = 2.0  # seconds that another job may take to write its lock or to remove a stale one
PAUSE = 0.02
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}


class FolderLock:
    """Lock that gives one job exclusive use of a folder: a file that only one process can create.

    The lock is written under a private name and then hard-linked to its final name. Readers
    therefore never see a partial file, even if the writer is killed. On filesystems without hard
    links, the file is created with ``O_CREAT | O_EXCL``.

    A stale lock is taken over at once in two cases: its holder has certainly ended, or its holder
    is an earlier start of the same job or chain of jobs (see ``lock_holder``). In all other cases
    the user has to decide. The holder calls ``check`` before it writes.
    """

    def __init__(self, folder: Path, job_id: str | None) -> None:
        self.path = folder / NAME
        self._own = identity(job_id)
        self.held = False

    def acquire(self) -> None:
        """Acquire the lock. Raises ``LockError``, which names the holder, if another job has it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                retries.call(self._create)
            except FileExistsError:
                self._clear_stale(time.monotonic() > deadline)
                continue
            except OSError as error:
                raise self._refusal(error) from error
            self.held = True
            return

    @property
    def claim(self) -> Claim:
        """Return the claim that writers verify before they write into the folder."""
        return Claim(str(self.path), self._own["token"])

    def check(self) -> None:
        """Raise ``LockError`` if another start has taken over the folder; then this job must not write."""
        if self.held:
            self.claim.check()

    def release(self) -> None:
        """Release the lock; a lock that another job has taken over stays."""
        if self.held and self._read() == self._own:
            try:
                retries.call(os.unlink, self.path)
            except OSError as error:  # the next start finds that the holder has ended
                logger.warning("cannot delete %s: %s", self.path, error.strerror)
        self.held = False

    def _refusal(self, error: OSError) -> HpctrainError:
        """Return the error for a lock that cannot be written; on a full disk, a later start may succeed."""
        if error.errno in PASSING:
            return cannot_write(self.path, error)
        return LockError(f"cannot write to the run's folder {self.path.parent}: {error.strerror}")

    def _create(self) -> None:
        """Create the lock file with its full content. Raises ``FileExistsError`` if a lock exists."""
        private = atomic.private_name(self.path)
        try:
            self._write(private)
            os.link(private, self.path)
        except OSError as error:
            # A network filesystem may repeat a call that has succeeded and then report EEXIST.
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
            os.write(handle, json.dumps(self._own).encode())  # less than a page: written completely or not at all
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
        """Remove a lock whose holder is dead. Raises ``LockError`` if the holder may be alive.

        An unreadable lock may still be in the middle of being written. It is an error only if
        ``late``.
        """
        holder = self._read()
        if holder is None:
            if late and os.path.lexists(self.path):  # true for a dangling symbolic link, too
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
        """Remove the lock of this holder only; return whether this process removed it.

        If several processes find the same dead holder, exactly one may remove its lock. The others
        must not remove the new lock that this process creates next. Therefore the removal has its
        own lock file, named after the dead holder. The process that created this file reads the
        holder again before it removes anything.
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
            raise self._refusal(error) from error
        try:
            if self._read() != holder:
                return False
            self.path.unlink()
            return True
        finally:
            mark.unlink(missing_ok=True)
