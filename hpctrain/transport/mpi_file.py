"""Collective file writes with MPI-IO, which aggregates small pieces into large requests."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpctrain.transport.activity import waiting

# Error codes of the operating system for MPI's error classes.
_NUMBERS = {
    MPI.ERR_NO_SPACE: errno.ENOSPC,
    MPI.ERR_QUOTA: errno.EDQUOT,
    MPI.ERR_READ_ONLY: errno.EROFS,
    MPI.ERR_ACCESS: errno.EACCES,
    MPI.ERR_NO_SUCH_FILE: errno.ENOENT,
    MPI.ERR_FILE_EXISTS: errno.EEXIST,
    MPI.ERR_IO: errno.EIO,
}


class MpiFile:
    """New file of ``size`` bytes, open on all ranks. Every method is collective.

    The size is set first. MPI libraries also write the holes between pieces, with the content that
    they have read there. Beyond the end of a file, they would write arbitrary content of their
    buffers.

    ``hints`` are MPI's: ``striping_factor``, ``striping_unit``, ``cb_nodes``, ...; MPI ignores
    unknown ones. Errors are raised as ``OSError``.
    """

    def __init__(self, comm: MPI.Intracomm, path: Path, size: int, hints: Mapping[str, str]) -> None:
        info = MPI.Info.Create()
        for name, value in hints.items():
            info.Set(name, value)
        try:
            with _translating(path), waiting("open a file"):
                mode = MPI.MODE_CREATE | MPI.MODE_EXCL | MPI.MODE_RDWR
                self._file = MPI.File.Open(comm, os.fspath(path), mode, info)
                self._file.Set_size(size)
        finally:
            info.Free()
        self._path = path

    def write(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Write pieces of bytes at their offsets; a rank may pass an empty sequence. Collective."""
        ordered = sorted(pieces, key=lambda piece: piece[0])
        lengths = [len(data) for _, data in ordered]
        places = _blocks(lengths, [offset for offset, _ in ordered])
        memory = _blocks(lengths, [np.frombuffer(data, dtype=np.uint8).ctypes.data for _, data in ordered])
        try:
            with _translating(self._path), waiting("write a file"):
                self._file.Set_view(0, MPI.BYTE, places)
                self._file.Write_all([MPI.BOTTOM, 1 if ordered else 0, memory])
        finally:
            places.Free()
            memory.Free()

    def close(self) -> None:
        """Flush the file to disk and close it. Collective."""
        try:
            with _translating(self._path), waiting("flush a file"):
                self._file.Sync()
        finally:
            self._file.Close()


def _blocks(lengths: Sequence[int], places: Sequence[int]) -> MPI.Datatype:
    if not lengths:
        return MPI.BYTE.Dup().Commit()
    return MPI.BYTE.Create_hindexed(lengths, places).Commit()


@contextmanager
def _translating(path: Path) -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        number = _NUMBERS.get(error.Get_error_class())
        text = os.strerror(number) if number else " ".join(error.Get_error_string().split())
        raise OSError(number or errno.EIO, text, str(path)) from error
