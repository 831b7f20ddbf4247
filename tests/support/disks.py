"""A small disk for the ranks of a test, which can be full or read-only, if mounting is permitted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.faults import SmallDisk

PLENTY = 8 << 20


class Disk(SmallDisk):
    """Filesystem in memory that can also be mounted read-only."""

    def writable(self, yes: bool) -> None:
        """Remount it, read-only or writable."""
        done = self._mount("-o", f"remount,{'rw' if yes else 'ro'}")
        assert not done.returncode, done.stderr


@contextmanager
def shared_disk(folder: Path, comm: Any) -> Iterator[Disk]:
    """Mount a disk once for all ranks; skip the test on all of them if that is not permitted."""
    disk = Disk(folder)
    why = ""
    if comm.rank == 0:
        why = "that takes root" if os.geteuid() else disk.mount()
    why = comm.broadcast_object(why)
    if why:
        pytest.skip(f"cannot mount a small disk: {why}")
    try:
        yield disk
    finally:
        # No barrier here: a rank whose test failed would never arrive. The mount ends when the last file is closed.
        if comm.rank == 0:
            disk.unmount()
