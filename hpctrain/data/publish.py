"""Atomic writing of a data file."""

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
    """The file under HDF5: after the first failure, which is stored, all further writes are ignored.

    Note: HDF5 buffers data and cannot give up a file whose disk is full. It tries again at every
    close and at the end of the process, where the library was seen to crash. So HDF5 does not see
    the failure; the code that opened the sink checks ``failure`` and removes the file.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all bytes, or none after a failure; return the full length."""
        view = memoryview(data).cast("B")
        done = 0
        while self.failure is None and done < len(view):
            try:
                done += super().write(view[done:]) or 0
            except OSError as error:
                self.failure = error
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; bytes that could not be written read as zeros, where HDF5 would use random memory."""
        view = memoryview(buffer).cast("B")
        done = super().readinto(view) or 0
        view[done:] = bytes(len(view) - done)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the length if possible."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = error
            return self.tell()


@contextlib.contextmanager
def new_file(out: Path, kind: str, version: int) -> Iterator[h5py.File]:
    """Open a temporary HDF5 file that is renamed to ``out`` when the block ends without an error.

    Missing parent folders are created. After an error the temporary file is removed, and an
    existing file stays.
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
