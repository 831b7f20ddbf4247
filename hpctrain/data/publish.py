"""Write a data file so that it is either there in full or not there at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import h5py

from hpctrain._version import __version__
from hpctrain.errors import DataError


@contextlib.contextmanager
def new_file(out: Path, kind: str, version: int) -> Iterator[h5py.File]:
    """Open a temporary HDF5 file that takes the name ``out`` when the block ends without an error.

    Folders above it are made; on any error the temporary file is removed and the old file, if any, stays.
    """
    if out.is_dir():
        raise DataError(f"cannot write {out}: it is a folder")
    temporary = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(temporary, "w") as file:
            file.attrs["format"] = kind
            file.attrs["format_version"] = version
            file.attrs["creator"] = f"hpctrain {__version__}"
            file.attrs["created"] = datetime.now(UTC).isoformat(timespec="seconds")
            yield file
            file.flush()  # close() swallows a full disk, flush() does not
        _sync(temporary)
        os.replace(temporary, out)
        _sync(out.parent)
    except (OSError, RuntimeError) as error:
        raise DataError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
