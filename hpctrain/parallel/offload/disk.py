"""Lend memory that a file on a disk stands behind.

Note: nothing is left. A file loses its name as soon as it is mapped, so its space is free again when the process is
gone, however that ends. Only a process killed while the file is made leaves one with a name; the next start of the
same rank removes it, unless another job, which then holds the file's lock, is making it right now.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.util import atomic
from hpctrain.util.text import printable

MIB = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Disk:
    """Make files in a folder for one rank; a call returns so many bytes of a new one, zeros."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = Path(folder).expanduser()
        self._mark = f"hpctrain-offload-rank{rank}-"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in sorted(self._folder.glob(f"{self._mark}{socket.gethostname()}-*")):
                if not _remove_unless_locked(left):
                    logger.warning("%s belongs to another user: it is left there", printable(left))
        except OSError as error:
            raise self._refused(error) from error

    def __call__(self, nbytes: int) -> Tensor:
        """Return memory; every byte has its place on the disk, so that writing to it cannot fail for lack of space."""
        path = self._folder / f"{self._mark}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._check_space(nbytes)
            descriptor = atomic.create(path, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.posix_fallocate(descriptor, 0, nbytes)
                # mmap.mmap would keep a descriptor for each file. By the descriptor: the name may be another's by now.
                return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
            finally:
                path.unlink()
                os.close(descriptor)
        except OSError as error:
            raise self._refused(error, nbytes) from error

    def _check_space(self, nbytes: int) -> None:
        """Raise ``OSError`` where the disk has less; posix_fallocate would fill it up before it says so."""
        system = os.statvfs(self._folder)
        if system.f_bavail * system.f_frsize < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _refused(self, error: OSError, nbytes: int = 0) -> UsageError:
        what = f"setting offload.disk = {self._folder}"
        if error.errno not in _FULL:
            return UsageError(f"{what}: {error.strerror}: must be a folder in which every rank can make files")
        system = os.statvfs(self._folder)
        free = system.f_bavail * system.f_frsize
        missing = f"{max(nbytes - free, 0) / MIB:.0f} MiB are missing" if free < nbytes else "a quota allows no more"
        return UsageError(f"{what}: {nbytes / MIB:.0f} MiB more are needed, {free / MIB:.0f} MiB are free: {missing}")


def _remove_unless_locked(path: Path) -> bool:
    """Remove a file that a process of this user left behind; return False if it is not this user's regular file."""
    try:
        if os.lstat(path).st_uid != os.geteuid():
            return False
        descriptor = atomic.reopen(path)
    except FileNotFoundError:
        return True  # its process has just removed it
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
    return True
