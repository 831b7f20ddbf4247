"""Tar files of samples, written and read by Python's tarfile."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Members = Iterable[tuple[str, bytes]]


def write_tar(path: Path, members: Members, kind: int = tarfile.USTAR_FORMAT, **attributes: Any) -> Path:
    """Write members in a header format; ``attributes`` are those of each TarInfo."""
    with tarfile.open(path, "w", format=kind) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in attributes.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data))
    return path


def samples_in_order(path: Path) -> list[dict[str, Any]]:
    """Return the samples of a tar, read by tarfile from its beginning; names have one dot and a unique key."""
    found: dict[str, dict[str, Any]] = {}
    with tarfile.open(path) as archive:
        for info in archive:
            if info.isreg():
                key, _, extension = info.name.rpartition(".")
                file = archive.extractfile(info)
                assert file is not None
                found.setdefault(key, {"__key__": key})[extension.lower()] = file.read()
    return list(found.values())


def numbered(count: int, first: int = 0) -> list[tuple[str, bytes]]:
    """Return members of samples: a class, and a text that names it."""
    return [
        member
        for number in range(first, first + count)
        for member in ((f"{number:05d}.cls", b"%d" % number), (f"{number:05d}.txt", b"sample %d" % number))
    ]
