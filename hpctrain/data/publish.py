"""Write a data file so that it is either there in full or not there at all."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py

from hpctrain._version import __version__
from hpctrain.errors import DataError
from hpctrain.util import atomic


class _Sink(io.FileIO):
    """Be the file under HDF5: keep the first failure, and from then on take everything and write nothing.

    Note: HDF5 holds data back and cannot give up a file whose disk is full. It tries again at every close and at the
    end of the process, where the library was seen to crash. So it never hears of the failure; whoever opened the
    sink looks at ``failure`` and removes the file.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all bytes, or none after a failure."""
        view = memoryview(data).cast("B")
        done = 0
        while self.failure is None and done < len(view):
            try:
                done += super().write(view[done:]) or 0
            except OSError as error:
                self.failure = error
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """Read all that was asked for; what could not be written is zeros, where HDF5 would take chance bytes."""
        view = memoryview(buffer).cast("B")
        done = super().readinto(view) or 0
        view[done:] = bytes(len(view) - done)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the length, if that can be done."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = error
            return self.tell()


@contextlib.contextmanager
def new_file(out: Path, kind: str, version: int) -> Iterator[h5py.File]:
    """Open a temporary HDF5 file that takes the name ``out`` when the block ends without an error.

    Folders above it are made; on any error the temporary file is removed and the old file, if any, stays.
    """
    if out.is_dir():
        raise DataError(f"cannot write {out}: it is a folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic.private_file(out) as handle, _Sink(handle, "w+", closefd=False) as sink:
            try:
                with h5py.File(sink, "w") as file:
                    _describe(file, kind, version)
                    yield file
            finally:
                if sink.failure:
                    raise sink.failure
    except (OSError, RuntimeError) as error:
        raise DataError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from error


def _describe(file: h5py.File, kind: str, version: int) -> None:
    file.attrs["format"] = kind
    file.attrs["format_version"] = version
    file.attrs["creator"] = f"hpctrain {__version__}"
    file.attrs["created"] = datetime.now(UTC).isoformat(timespec="seconds")
