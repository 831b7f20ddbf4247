"""Open files of a data set: maps and descriptors, a limited number of them, which do not travel to other processes."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.data.ragged_layout import Block, FileFacts
from hpctrain.errors import DataError
from hpctrain.stage.local import staged

MOST_OPEN = 256  # files
Array = npt.NDArray[Any]


class OpenFile:
    """A file that is read at random places; ``facts`` are those that the data set knows."""

    def __init__(self, facts: FileFacts) -> None:
        self.facts = facts
        self._place = staged(facts.path)
        try:
            self.handle = os.open(self._place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"cannot open {facts.path}: {error.strerror}") from error
        self.process = os.getpid()
        self._file: h5py.File | None = None
        self._views: dict[str, Array] = {}
        try:
            self.check()
            self._map = mmap.mmap(self.handle, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(self.handle)
            raise

    def check(self) -> None:
        """Raise ``DataError`` if the file has changed since the data set was opened."""
        now = os.fstat(self.handle)
        if (now.st_size, now.st_mtime_ns) != (self.facts.size, self.facts.changed):
            raise DataError(
                f"{self.facts.path} changed while it was read: its size or its time differs; start again with the new "
                "file"
            )

    def view(self, block: Block) -> Array | None:
        """Return a dataset as an array in the mapped file; None if HDF5 must read it."""
        if block.offset is None:
            return np.empty(block.shape, block.dtype) if 0 in block.shape and block.dtype != "|O" else None
        found = self._views.get(block.name)
        if found is None or found.shape != block.shape:
            count = int(np.prod(block.shape, dtype=np.int64))
            flat = np.frombuffer(self._map, np.dtype(block.dtype), count, block.offset)
            found = self._views[block.name] = flat.reshape(block.shape)
        return found

    def dataset(self, block: Block) -> h5py.Dataset:
        """Return a dataset that HDF5 must read."""
        if self._file is None:
            self._file = h5py.File(self._place, "r", locking=False)
        return self._file[block.name]

    def read(self, out: Array, offset: int) -> None:
        """Fill an array from the bytes at an offset of the file."""
        memory = memoryview(out.view(np.uint8).data).cast("B")
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self.handle, [memory[done:]], offset + done)
            except OSError as error:
                raise DataError(f"cannot read {self.facts.path}: {error.strerror}") from error
            if not count:
                raise DataError(f"{self.facts.path} ends at byte {offset + done}: it was truncated")
            done += count

    def close(self) -> None:
        self._views.clear()
        if self._file is not None and self.process == os.getpid():
            self._file.close()
        os.close(self.handle)


class OpenFiles:
    """The files of a data set that are open in this process; those not used for the longest time are closed."""

    def __init__(self, facts: list[FileFacts], open_file: Callable[[FileFacts], OpenFile] = OpenFile) -> None:
        self._facts, self._open = facts, open_file
        self._opened: OrderedDict[int, OpenFile] = OrderedDict()

    def __getitem__(self, number: int) -> OpenFile:
        found = self._opened.get(number)
        if found is not None and found.process == os.getpid():
            self._opened.move_to_end(number)
            return found
        if found is not None:  # of the process from which this one was forked
            del self._opened[number]
            found.close()
        self._opened[number] = found = self._open(self._facts[number])
        while len(self._opened) > MOST_OPEN:
            self._opened.popitem(last=False)[1].close()
        return found

    def close(self) -> None:
        """Close all files; they are opened again when they are read."""
        while self._opened:
            self._opened.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": OrderedDict()}

    def __del__(self) -> None:
        self.close()
