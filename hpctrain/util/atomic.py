"""The only module of hpctrain that opens files for writing: atomic whole files, and files that grow by lines.

Folders of runs are shared, so another user may have prepared files in them. A file is therefore
written under a name that cannot be guessed, which must not exist and is never a link. It is
flushed, renamed to its target, and the folder is flushed. A link at the target is replaced and
never followed. ``tests/util/test_writers.py`` checks that no other module opens files for writing.

Every system call that may be repeated goes through ``call``: a function that calls its first
argument with the others. A caller passes its own to repeat calls that fail with EIO or ESTALE.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.errors import FileSystemError, LockError
from hpctrain.util.reading import read_json
from hpctrain.util.retry import retries

Call = Callable[..., Any]

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KNOWN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GROWING = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Some network filesystems flush folders themselves; a folder may be writable but not readable.
_NO_FOLDER_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM}
_DEVICES = (("/", "dev"), ("/", "proc"), ("/", "sys"))  # /dev/stdout is a link, which must not be replaced
_MEMORY = ("/", "dev", "shm")  # plain files in memory
_LONGEST = 150  # bytes of a target's name in the private name: filesystems allow 255 in total


def call_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function once: the default ``call`` of this module."""
    return function(*arguments)


# Whole files ----------------------------------------------------------------------------------------------------------


def write_text(path: str | Path, text: str, *, mode: int = 0o666, call: Call = call_once) -> None:
    """Write a text file in UTF-8. Raises ``OSError``; an existing file then stays."""
    with replacing(path, mode=mode, call=call) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacing(path: str | Path, *, mode: int = 0o666, call: Call = call_once) -> Iterator[BinaryIO]:
    """Open a private file that is renamed to ``path`` if the block ends without an error. Raises ``OSError``."""
    with private_file(path, mode=mode, call=call) as handle, open(handle, "w+b", closefd=False) as file:
        yield file


@contextmanager
def private_file(path: str | Path, *, mode: int = 0o666, call: Call = call_once) -> Iterator[int]:
    """Open a private file as a descriptor; at the end of the block it is flushed and renamed to ``path``.

    Raises ``OSError`` if it cannot be written. After any error the private file is removed.
    """
    path = Path(path)
    check_target(path)
    private, handle = call(_begin, path, mode)
    try:
        try:
            yield handle
            call(os.fsync, handle)  # by the descriptor that wrote: only that one reports failures
            identity = _identity(os.fstat(handle))
        finally:
            os.close(handle)
        call(_rename, private, path, identity)
    except BaseException:
        discard(private)
        raise
    call(flush_folder, path.parent)


def check_target(path: Path) -> None:
    """Raise ``OSError`` if a file must not have this name: that of a folder, a device, a named pipe, or in ``/dev``."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        mode = stat.S_IFREG  # missing, or a dangling link
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    parts = Path(os.path.realpath(path.parent)).parts
    if not stat.S_ISREG(mode) or parts[:2] in _DEVICES and parts[:3] != _MEMORY:
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


# The steps, for writers that need them one by one ---------------------------------------------------------------------


def private_name(path: Path) -> Path:
    """Return a private name beside a target: hidden, with this host and process, and impossible to guess."""
    name = os.fsdecode(os.fsencode(path.name)[:_LONGEST])
    return path.with_name(f".{name}.tmp-{socket.gethostname()[:32]}-{os.getpid()}-{secrets.token_hex(8)}")


def create(path: str | Path, mode: int = 0o666) -> int:
    """Create a file that must not exist, and return its descriptor for reading and writing. Raises ``OSError``."""
    return os.open(path, _NEW, mode)


def reopen(path: str | Path) -> int:
    """Open a private file of another process for reading and writing. Raises ``OSError`` for a link."""
    return _checked(os.open(path, _KNOWN), path)


def on_disk(handle: int) -> bool:
    """Return whether an open file is on a disk of this node, with a filesystem such as ext4 or XFS.

    Memory, overlays and most network filesystems have no device; Lustre gives a number that is no device here.
    """
    device = os.fstat(handle).st_dev
    return os.path.exists(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")


def reopen_direct(handle: int) -> int:
    """Open an open file again, past the page cache; return -1 if it is not on a disk of this node, or cannot be."""
    if not on_disk(handle):
        return -1
    try:
        return os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1


def put(private: Path, path: Path, *, call: Call = call_once) -> None:
    """Rename a complete and flushed private file to its target. Raises ``OSError``. The folder is not flushed."""
    check_target(path)
    call(_rename, private, path, _identity(os.lstat(private)))


def put_folder(private: Path, path: Path) -> Path | None:
    """Rename a complete private folder to its target. Raises ``OSError``; an existing folder there then stays.

    An existing folder gets a private name, which is returned.
    """
    flush_folder(private)
    earlier = private_name(path) if path.exists() else None
    if earlier is not None:
        os.rename(path, earlier)
    try:
        os.rename(private, path)
    except OSError:
        if earlier is not None:
            os.rename(earlier, path)
        raise
    flush_folder(path.absolute().parent)
    return earlier


def discard(private: Path) -> None:
    """Remove a private file if it exists."""
    with suppress(OSError):  # the error that led here is more important
        private.unlink(missing_ok=True)


def flush_folder(folder: str | Path) -> None:
    """Flush a folder, so that a rename in it survives a power failure. Raises ``OSError``."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FSYNC:
            raise


def set_aside(path: Path) -> Path:
    """Rename a damaged file beside its own name, so that its contents are kept; return the new name."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.name}.damaged-{now}-{secrets.token_hex(4)}")
    os.rename(path, aside)
    return aside


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Remove private files that killed processes left for these targets; only for the holder of the folder's lock."""
    starts = tuple(f".{name}.tmp-" for name in names)
    with suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(starts):
                discard(Path(entry.path))


def _begin(path: Path, mode: int) -> tuple[Path, int]:
    """Create a private file under a new name: a repeated call must not find its own first file."""
    private = private_name(path)
    return private, create(private, mode)


def _rename(private: Path, path: Path, identity: tuple[int, int]) -> None:
    try:
        os.rename(private, path)
    except FileNotFoundError:
        # A network filesystem may repeat a rename that has succeeded.
        if _identity(os.lstat(path)) != identity:
            raise


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


# Files that grow ------------------------------------------------------------------------------------------------------


def open_growing(path: str | Path, *, mode: int = 0o666, call: Call = call_once) -> int:
    """Open a file for appending, create it if it does not exist, and return its descriptor.

    Raises ``OSError`` for a link and for anything but a regular file with one name.
    """
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a link", str(path))
    handle = _checked(call(os.open, path, _GROWING, mode), path)
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise OSError(errno.EMLINK, "it has a second name (hard link)", str(path))
    return handle


def append_line(handle: int, line: str, *, call: Call = call_once) -> None:
    """Append a line to a growing file in one call, so that lines of several processes do not mix.

    A full disk first accepts a part and then raises: that part is removed, in a file with one writer for sure.
    """
    data = (line + "\n").encode("utf-8")
    done = call(os.write, handle, data)
    begin = os.lseek(handle, 0, os.SEEK_CUR) - done
    try:
        while done < len(data):
            done += call(os.write, handle, data[done:])
    except OSError:
        if os.fstat(handle).st_size == begin + done:  # no other process has written behind it
            os.ftruncate(handle, begin)
        raise


def _checked(handle: int, path: str | Path) -> int:
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


# Claim on a folder ----------------------------------------------------------------------------------------------------


_MOST = 64 * 1024  # bytes of such a file


@dataclass(frozen=True)
class Claim:
    """The file and its expected token. Processes that write for the claimant check it too."""

    path: str
    token: str

    def check(self) -> None:
        """Raise ``LockError`` if the file is gone or has another token, ``FileSystemError`` if it cannot be read.

        A start of the same run on another node takes the folder over if the scheduler reports that
        this one has ended. The scheduler may be wrong: a node that lost its connection continues to
        compute.
        """
        try:
            found: Any = retries.call(read_json, self.path, _MOST)
        except FileNotFoundError:
            raise LockError(f"{self.path} was deleted while this run held it: it ends and writes no more") from None
        except ValueError:
            found = None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise FileSystemError(f"cannot read {self.path}: {reason}; the owner of the folder is unknown") from error
        if isinstance(found, dict) and found.get("token") == self.token:
            return
        holder = found if isinstance(found, dict) else {}
        job, host = str(holder.get("job_id") or "without id")[:100], str(holder.get("host"))[:100]
        raise LockError(f"{self.path} is now that of job {job!r} on {host!r}: this run ends and writes no more")
