"""Open HDF5 files for reading, every way in which that fails said in one line, and map what can be mapped."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError

BLOCK = 4 << 20  # elements read at a time where a whole dataset is looked at


def open_file(path: str | Path) -> h5py.File:
    """Return the file, opened for reading; raise ``DataError`` where it is missing or not HDF5."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"no data file {path}: hpctrain data pack makes one")
    if not path.is_file():
        raise DataError(f"data file {path} is not a regular file")
    try:
        with path.open("rb"):
            pass
        if not h5py.is_hdf5(path):
            raise DataError(f"{path} is not an HDF5 file: hpctrain data pack makes one from text")
        # No lock: data files appear by rename and are never written again, and parallel filesystems often have none.
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise DataError(f"cannot open data file {path}: {error.strerror or error}") from error


def dataset_of(file: h5py.File, name: str) -> h5py.Dataset:
    """Return a dataset of an open file; raise ``DataError`` with the names that the file has instead."""
    found = file.get(name)
    if isinstance(found, h5py.Dataset):
        return found
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    has = f"it has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "it has no dataset"
    raise DataError(f"{file.filename} has no dataset /{name}: {has}")


def attribute(item: Any, name: str, default: Any = None) -> Any:
    """Return an attribute as a plain Python value: text as ``str``, numbers as ``int`` or ``float``."""
    value = item.attrs.get(name, default)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.item() if isinstance(value, np.generic) else value


def map_dataset(dataset: h5py.Dataset) -> npt.NDArray[Any] | None:
    """Return the dataset as a read-only memory map, or ``None`` where its bytes do not lie in the file in one piece.

    A map costs no copy, no lock and no open handle, and all ranks of a node share its pages.
    """
    offset = dataset.id.get_offset()  # none where chunked, virtual, external or not yet allocated
    if offset is None or dataset.dtype.hasobject:
        return None
    return np.memmap(dataset.file.filename, dtype=dataset.dtype, mode="r", offset=offset, shape=dataset.shape)


def checksum(dataset: h5py.Dataset) -> int:
    """Return the CRC-32 of a dataset's bytes in C order, read in blocks along its first dim."""
    rows = max(1, BLOCK // max(1, int(np.prod(dataset.shape[1:]))))
    crc32 = 0
    for start in range(0, len(dataset), rows):
        crc32 = zlib.crc32(np.ascontiguousarray(dataset[start : start + rows]).data, crc32)
    return crc32
