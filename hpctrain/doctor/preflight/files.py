"""Measure how fast ranks write into a folder, all at the same time, and whether all nodes see the same folder."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.doctor.finding import Finding, error, ok
from hpctrain.doctor.preflight.seats import Seat
from hpctrain.errors import UsageError
from hpctrain.util import atomic

if TYPE_CHECKING:
    from hpctrain.collectives.communicator import Communicator

BLOCK, FLUSH = 2**22, 2**24  # bytes of a write; bytes between two flushes, so that time is kept
MOST = 2**28  # bytes of a rank
_PART = 8  # part of the free room that all ranks together may take


@dataclass(frozen=True)
class Written:
    """Say what a rank has written and flushed, or why it could not; ``seen``: it sees what rank 0 has made."""

    nbytes: int = 0
    seconds: float = 0.0
    trouble: str = ""
    seen: bool = True

    @property
    def rate(self) -> float:
        """Return bytes a second; 0 where nothing was written."""
        return self.nbytes / self.seconds if self.seconds else 0.0


def measure(comm: Communicator, folder: Path, seconds: float) -> list[Written]:
    """Return what every rank has written; a call by all of them. No file stays."""
    from hpctrain.collectives.agreement import on_first_rank

    place, most = on_first_rank(comm, lambda: _prepare(folder, comm.size))
    own = Written(seen=False)
    try:
        if place.is_dir():
            own = write(place / f"{comm.rank}.bin", seconds, most)
        everyone: list[Written] = comm.all_gather_object(own)
    finally:
        if comm.rank == 0:
            with suppress(OSError):
                place.rmdir()
    return everyone


def write(path: Path, seconds: float, most: int = MOST) -> Written:
    """Write and flush until the time is over, or so many bytes are there; remove the file."""
    block = memoryview(os.urandom(BLOCK))
    done, begin = 0, time.perf_counter()
    try:
        with open(atomic.create(path), "wb", buffering=0) as file:
            while not done or done < most and time.perf_counter() - begin < seconds:
                for _ in range(FLUSH // BLOCK):
                    done += file.write(block)
                os.fsync(file.fileno())
        return Written(done, time.perf_counter() - begin)
    except OSError as failure:
        return Written(trouble=failure.strerror or str(failure))
    finally:
        with suppress(OSError):
            path.unlink()


def check(found: Sequence[Written], seats: Sequence[Seat], folder: Path) -> Iterator[Finding]:
    """Yield what is to be said of a folder."""
    unseen = sorted({seat.host for seat, one in zip(seats, found) if not one.seen})
    if unseen:
        yield error(
            "files",
            f"{', '.join(unseen[:8])}{' and more' if len(unseen) > 8 else ''} do not see what {seats[0].host} has made "
            f"in {folder}",
            "all ranks of a run write into one checkpoint, and read it",
            "name a folder of the parallel filesystem with --folder, and in run.folder",
        )
    for seat, one in zip(seats, found):
        if one.trouble:
            yield error(
                "files",
                f"rank {seat.rank} on {seat.host} cannot write into {folder}: {one.trouble}",
                "no checkpoint will be written",
                "see quota and df there",
            )
    if not unseen and not any(one.trouble for one in found):
        rate = together(found)
        yield ok("files", f"{len(found)} ranks wrote {rate / 1e6:.0f} MB/s together into {folder}, flushed")


def together(found: Sequence[Written]) -> float:
    """Return the bytes a second of all ranks."""
    return sum(one.rate for one in found)


def _prepare(folder: Path, ranks: int) -> tuple[Path, int]:
    """Make a folder to write into; return it, and the bytes that each rank may write there."""
    place = folder.absolute() / f".hpctrain-doctor-{uuid.uuid4().hex}"
    try:
        place.mkdir(mode=0o700)
        room = os.statvfs(place)
    except OSError as failure:
        raise UsageError(f"cannot write into {folder}: {failure.strerror}: name another --folder") from failure
    return place, min(MOST, room.f_bavail * room.f_frsize // (_PART * ranks))
