"""Reference rates of disk and memory: plain writes and reads, and the cost of the checksum alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from saving.candidates import Candidate
from saving.disk import delete, read_at, write_at
from saving.names import CRC, RAW, RAW_ONE, RAW_READ
from saving.work import Work, bytes_of

from hpctrain.checkpoint.format.integrity import crc32


def writers(work: Work) -> Iterator[Candidate]:
    """Yield the plain writes: each rank writes its share of the bytes, to a separate file or to one common file."""
    share = work.place.share(work.nbytes)
    yield _writer(work, RAW, work.file(f"raw-{work.place.rank}"), share, 0)
    yield _writer(work, RAW_ONE, work.file("raw"), share, share.start)


def _writer(work: Work, name: str, path: Path, share: slice, offset: int) -> Candidate:
    data = bytes_of(work.flat)[share]

    def check() -> str:
        found = np.fromfile(path, np.uint8, count=len(data), offset=offset)
        same = np.array_equal(found, np.frombuffer(data, np.uint8))
        return "" if same else f"{path.name} does not hold what was written"

    return Candidate(
        name,
        work.nbytes,
        call=lambda: write_at(path, data, offset),
        check=check,
        prepare=lambda: delete(path),
        needed=True,
    )


def readers(work: Work, path: Path) -> Iterator[Candidate]:
    """Yield the plain read of the bytes of a load, on every rank, and the checksum of equally many bytes."""
    data = bytes_of(work.spare)
    yield Candidate(
        RAW_READ,
        work.nbytes,
        call=lambda: read_at(path, data),  # from the start: the number of bytes matters, not their order
        needed=True,
    )
    flat = bytes_of(work.flat)
    yield Candidate(CRC, work.nbytes, call=lambda: crc32(flat), needed=True)
