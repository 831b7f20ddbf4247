"""Lock of a run folder, without flock, which some filesystems ignore, and the rules for taking a folder over.

A process id is unique only on one machine, since one boot, in one PID namespace. A job id is unique
only together with its restart count: steps of one start may run at the same time, and a scheduler
may restart a job under the same id. A lock therefore records all of these values.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError, LockError
from hpctrain.log import logger
from hpctrain.util import atomic
from hpctrain.util.atomic import Claim
from hpctrain.util.reading import read_json
from hpctrain.util.retry import TRANSIENT, cannot_write, retries

NAME = "lock.json"
PATIENCE = 2.0  # seconds
PAUSE = 0.02
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP}
CHAIN = "HPCTRAIN_CHAIN"  # set by job scripts: the id of the first job in a chain of continuation jobs
START = "HPCTRAIN_START"  # set by job scripts: a different value in each start

Holder = Mapping[str, Any]


def identity(job_id: str | None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the identity that this process writes into a lock."""
    return {
        "job_id": job_id,
        "chain": environ.get(CHAIN) or None,
        "start": _start(environ),
        "step": environ.get("SLURM_STEP_ID"),
        "host": socket.gethostname(),
        "machine_id": _text("/etc/machine-id"),
        "boot_id": _text("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _link("/proc/self/ns/pid"),
        "uid": os.getuid(),
        "pid": os.getpid(),
        "started": process_started(os.getpid()),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "token": secrets.token_hex(16),
    }


def why_over(holder: Holder, own: Holder) -> str | None:
    """Return why this start may take the folder over; None if the holder may be alive and is unrelated.

    An earlier start of the same job or chain may still be alive: a node that lost its network
    continues to compute. It checks the lock before each checkpoint and then exits.
    """
    if is_over(holder, own):
        return f"its process {holder.get('pid')} on this host no longer exists"
    if holder.get("host") == own["host"]:
        if own["machine_id"] and holder.get("machine_id") == own["machine_id"] and not _same(holder, own, "boot_id"):
            return "its host has rebooted since"
    # An unknown start counts as another one.
    is_earlier = holder.get("start") is None or own["start"] is None or holder["start"] != own["start"]
    for name, text in (("job_id", "job"), ("chain", "chain of jobs")):
        if own[name] and holder.get(name) == own[name] and is_earlier:
            return f"it belongs to an earlier start of this {text}, on {holder.get('host')}"
    return None


def is_over(holder: Holder, own: Holder) -> bool:
    """Return whether the holder has certainly ended: it ran on this machine and is visible from here."""
    names = ("boot_id", "pid_namespace")
    in_sight = holder.get("host") == own["host"] and all(_same(holder, own, name) for name in names)
    return in_sight and not is_running(holder)


def is_running(holder: Holder, kill: Callable[[int, int], None] = os.kill) -> bool:
    """Return whether the holder's process is running; the holder must be on this host and in this PID namespace."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    try:
        kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # process of another user; /proc may hide it (hidepid)
        pass
    try:
        found = _state(pid)
    except OSError:
        return True
    return found is not None and found == holder.get("started")


def process_started(pid: int) -> int | None:
    """Return the start time of a process on this host in clock ticks since boot; None if it does not run.

    The process id alone is not sufficient: ids are reused after a reboot or after a long time.
    """
    with suppress(OSError):
        return _state(pid)
    return None


def _state(pid: int) -> int | None:
    """Return the start time of a process; None for a zombie, which remains if a container reaps no orphans."""
    text = Path(f"/proc/{pid}/stat").read_text()
    # Fields 3 and 22. Field 2 is the command name in parentheses, which may contain any character.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _start(environ: Mapping[str, str]) -> str | None:
    """Return a value that differs between starts of a job and is equal for all processes of one start.

    PBS has no restart count. Its job cookies are not guaranteed to differ: two nodes may draw the
    same one.
    """
    if start := environ.get(START):
        return start[:100]
    if job := environ.get("SLURM_JOB_ID"):
        return f"{job}.{environ.get('SLURM_RESTART_COUNT') or 0}"
    if cookie := environ.get("PBS_JOBCOOKIE"):  # a secret of the job's daemons: stored only as a hash
        return hashlib.sha256(f"hpctrain {cookie}".encode()).hexdigest()[:16]
    return None


def _same(holder: Holder, own: Holder, name: str) -> bool:
    """Return whether a value is equal in both, or missing in a lock written by an older version."""
    return holder.get(name) is None or holder[name] == own[name]


def _text(path: str) -> str | None:
    with suppress(OSError):
        return Path(path).read_text(encoding="ascii", errors="replace").strip()[:100] or None
    return None


def _link(path: str) -> str | None:
    with suppress(OSError):
        return os.readlink(path)
    return None


@dataclass(frozen=True)
class LockCalls:
    """System calls of a lock."""

    create: Callable[[Path, int], int] = atomic.create
    fsync: Callable[[int], None] = os.fsync
    link: Callable[[Path, Path], None] = os.link
    unlink: Callable[..., None] = Path.unlink
    sleep: Callable[[float], None] = time.sleep


class FolderLock:
    """Lock that gives one job exclusive use of a folder: a file that only one process can create.

    The lock is written under a private name and then hard-linked to its final name. Readers
    therefore never see a partial file, even if the writer is killed. On filesystems without hard
    links, the file is created with ``O_CREAT | O_EXCL``.

    A stale lock is taken over at once if ``why_over`` gives a reason. In all other cases the user
    has to decide. The holder calls ``check`` before it writes. ``patience`` is the number of seconds
    that another job may take to write its lock or to remove a stale one.
    """

    def __init__(
        self, folder: Path, job_id: str | None, *, patience: float = PATIENCE, calls: LockCalls = LockCalls()
    ) -> None:
        self.path, self._patience, self._calls = folder / NAME, patience, calls
        self._own = identity(job_id)
        self.held = False

    def acquire(self) -> None:
        """Acquire the lock. Raises ``LockError``, which names the holder, if another job has it."""
        deadline = time.monotonic() + self._patience
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

    @property
    def holder(self) -> dict[str, Any] | None:
        """Return the content of the lock file if this process holds the lock."""
        return dict(self._own) if self.held else None

    def inherit(self, holder: dict[str, Any]) -> None:
        """Acquire the lock from a process of the same job that has died. Raises ``LockError`` if another job has it."""
        if self._read() == holder:
            self._remove(holder, timed_out=True)
        self.acquire()

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
        if error.errno in TRANSIENT:
            return cannot_write(self.path, error)
        return LockError(f"cannot write to the run's folder {self.path.parent}: {error.strerror}")

    def _create(self) -> None:
        """Create the lock file with its full content. Raises ``FileExistsError`` if a lock exists."""
        private = atomic.private_name(self.path)
        try:
            self._write(private)
            self._calls.link(private, self.path)
        except OSError as error:
            # A network filesystem may repeat a call that has succeeded and then report EEXIST.
            if isinstance(error, FileExistsError) and private.exists() and private.stat().st_nlink == 2:
                return
            if error.errno not in _NO_LINKS:
                raise
            self._write(self.path)
        finally:
            self._calls.unlink(private, missing_ok=True)

    def _write(self, path: Path) -> None:
        handle = self._calls.create(path, 0o644)
        try:
            os.write(handle, json.dumps(self._own).encode())  # less than a page: written completely or not at all
            self._calls.fsync(handle)
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

    def _clear_stale(self, timed_out: bool) -> None:
        """Remove a lock whose holder is dead. Raises ``LockError`` if the holder may be alive.

        An unreadable lock may still be in the middle of being written. It is an error only if
        ``timed_out``.
        """
        holder = self._read()
        if holder is None:
            if timed_out and os.path.lexists(self.path):  # true for a dangling symbolic link, too
                raise LockError(f"cannot read {self.path}: if no job works in this folder, delete that file")
            self._calls.sleep(PAUSE)
            return
        over = why_over(holder, self._own)
        if over is None:
            raise LockError(
                f"job {holder.get('job_id') or 'without id'} on {holder.get('host')} (process {holder.get('pid')}, "
                f"since {holder.get('since')}) works in {self.path.parent}: give this run its own folder, "
                f"or delete {self.path} if that job is gone"
            )
        if self._remove(holder, timed_out):
            logger.warning("took over the lock on %s: %s", self.path.parent, over)

    def _remove(self, holder: dict[str, Any], timed_out: bool) -> bool:
        """Remove the lock of this holder only; return whether this process removed it.

        If several processes find the same dead holder, exactly one may remove its lock. The others
        must not remove the new lock that this process creates next. Therefore the removal has its
        own lock file, named after the dead holder. The process that created this file reads the
        holder again before it removes anything.
        """
        digest = hashlib.sha256(json.dumps(holder, sort_keys=True).encode()).hexdigest()[:16]
        mark = self.path.with_name(f".{NAME}.removing-{digest}")
        try:
            os.close(self._calls.create(mark, 0o644))
        except FileExistsError:
            if timed_out:
                raise LockError(f"a job died while taking over {self.path}: delete that file and {mark}") from None
            self._calls.sleep(PAUSE)
            return False
        except OSError as error:
            raise self._refusal(error) from error
        try:
            if self._read() != holder:
                return False
            self._calls.unlink(self.path)
            return True
        finally:
            self._calls.unlink(mark, missing_ok=True)
