"""Faults of the disk of some ranks: system calls that fail or lie, a full filesystem, a limit on file sizes."""

from __future__ import annotations

import builtins
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PRIVATE = ".tmp-"  # part of the name of a checkpoint that is being written


def is_private(target: Any) -> bool:
    """Return whether a path or a descriptor belongs to a file that is being written under a private name."""
    if isinstance(target, int):
        try:
            target = os.readlink(f"/proc/self/fd/{target}")
        except OSError:
            return False
    return PRIVATE in os.fspath(target) if isinstance(target, (str, os.PathLike)) else False


class Fault:
    """Replacement of this process's system calls on private files, from their ``call``-th use on; ``fired`` counts."""

    def __init__(
        self, patch: pytest.MonkeyPatch, names: tuple[str, ...], act: Callable[..., Any], call: int = 1
    ) -> None:
        self.uses = self.fired = 0
        self._act, self._call = act, call
        for name in names:
            home = builtins if name == "open!" else os
            name = name.rstrip("!")
            if hasattr(home, name):
                patch.setattr(home, name, self._replaced(getattr(home, name)))

    def _replaced(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(target: Any, *args: Any, **keywords: Any) -> Any:
            if is_private(target):
                self.uses += 1
                if self.uses >= self._call:
                    self.fired += 1
                    return self._act(real, target, *args, **keywords)
            return real(target, *args, **keywords)

        return replacement


WRITES, OPENS, READS = ("pwrite", "pwritev"), ("open", "open!"), ("preadv", "pread")


def failing(number: int) -> Callable[..., Any]:
    """Return a call that fails with an errno."""

    def act(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return act


def raising(error: Exception) -> Callable[..., Any]:
    """Return a call that raises."""

    def act(*_: Any, **__: Any) -> Any:
        raise error

    return act


def once(act: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that misbehaves once and works from then on."""
    left = [True]

    def first(real: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if left:
            left.clear()
            return act(real, *args, **keywords)
        return real(*args, **keywords)

    return first


def half(real: Callable[..., int], handle: int, data: Any, offset: int) -> int:
    """Write about half of the bytes, as a nearly full disk may."""
    if isinstance(data, (list, tuple)):
        return real(handle, [data[0][: max(1, len(data[0]) // 2)]], offset)
    return real(handle, data[: max(1, len(data) // 2)], offset)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Limit this process's files to so many bytes; Python ignores SIGXFSZ, so calls fail with EFBIG."""
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def signal_storm(interval: float = 0.0005) -> Iterator[list[int]]:
    """Interrupt this process every so many seconds: slow system calls return EINTR or partial results."""
    come = [0]

    def count(*_: object) -> None:
        come[0] += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        yield come
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def unmount(folder: Path) -> None:
    """Unmount a filesystem, even if it is in use."""
    subprocess.run(["umount", "-l", folder], check=True, timeout=20)


class Ext4Disk:
    """Filesystem of the kind of a local disk, in a file of ``nbytes`` bytes; needs root.

    Its root has a file that takes the space that ``leave`` does not leave.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder, self._image, self._nbytes = folder, folder.with_name("disk.img"), nbytes

    def mount(self) -> str:
        """Mount it; return an empty string, or the reason for a failure."""
        self.folder.mkdir()
        self._image.touch()
        os.truncate(self._image, self._nbytes)
        for command in (
            ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", self._image],
            ["mount", "-o", "loop", self._image, self.folder],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            except FileNotFoundError:
                return f"there is no {command[0]}"
            if done.returncode:
                return done.stderr.strip() or f"{command[0]} failed"
        return ""

    def leave(self, free: int) -> None:
        """Leave so many bytes free, and a few blocks for the records of the filesystem itself."""
        with open(self.folder / "taken", "wb") as taken:
            status = os.statvfs(self.folder)
            if (take := (status.f_bavail - 16) * status.f_frsize - free) > 0:
                os.posix_fallocate(taken.fileno(), 0, take)

    def unmount(self) -> None:
        """Unmount it."""
        unmount(self.folder)
        self._image.unlink()


class SmallDisk:
    """Filesystem in memory whose size can be changed while it is used; needs root."""

    SIZE = 16 << 20

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mount(self) -> str:
        """Mount it; return an empty string, or the reason for a failure."""
        self.folder.mkdir()
        try:
            done = self._mount("-t", "tmpfs", "-o", f"size={self.SIZE}", "tmpfs")
        except FileNotFoundError:
            return "there is no mount"
        return done.stderr.strip() or "mount failed" if done.returncode else ""

    def leave(self, free: int) -> None:
        """Leave so many bytes free."""
        status = os.statvfs(self.folder)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        done = self._mount("-o", f"remount,size={used + free}")
        assert not done.returncode, done.stderr

    @property
    def free(self) -> int:
        """Return how many bytes are free."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize

    def unmount(self) -> None:
        """Unmount it."""
        unmount(self.folder)

    def _mount(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["mount", *options, self.folder], capture_output=True, text=True, timeout=20)
