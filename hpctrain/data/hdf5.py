"""Opening of HDF5 files for reading, with one-line errors for all failures, and memory maps of their datasets."""

from __future__ import annotations

import math
import os
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.errors import DataError
from hpctrain.stage.local import staged
from hpctrain.util.reading import open_regular
from hpctrain.util.text import printable, shorten

_ITSELF = "a data file must hold its data itself"
_MOST_LINKS = 8  # links within a file that are followed for one name
_DENSEST = 1 << 20  # bytes that one stored byte may represent, and bytes that may be unwritten
BLOCK = 4 << 20  # elements per read when a whole dataset is scanned


def open_file(path: str | Path) -> h5py.File:
    """Return the file, opened for reading. Raises ``DataError`` if it is missing or not HDF5."""
    path = Path(staged(path))
    if not path.exists():
        raise DataError(f"no data file {path}: create one with hpctrain data pack")
    if not path.is_file():
        raise DataError(f"data file {path} is not a regular file")
    try:
        os.close(open_regular(path))
        if not h5py.is_hdf5(path):
            raise DataError(
                f"{path} is not an HDF5 file: create one with hpctrain data pack (from text, .npz, tar, ...)"
            )
        # No lock: data files appear by rename and are never modified, and parallel filesystems often have no locks.
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise DataError(f"cannot open data file {path}: {error.strerror or error}") from error


def dataset_of(file: h5py.File, name: str) -> h5py.Dataset:
    """Return a dataset whose bytes are in this file. Raises ``DataError`` with the available names if it is missing.

    HDF5 follows external links, external storage and virtual datasets to other files as soon as a
    dataset is read. So each link is examined before it is followed, and the layout before the
    shape.
    """
    found = find_dataset(file, name)
    if found is not None:
        return found
    names = _names(file)
    has = f"it has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "it has no dataset"
    raise DataError(f"{file.filename} has no dataset /{name}: {printable(has)}")


def find_dataset(file: h5py.File, name: str) -> h5py.Dataset | None:
    """Return a dataset as ``dataset_of`` does; ``None`` if it does not exist."""
    try:
        found = _follow(file, name, _MOST_LINKS)
        if not isinstance(found, h5py.h5d.DatasetID):
            return None
        _check_layout(file, found, name)
        return h5py.Dataset(found)
    except (RuntimeError, OSError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = " ".join(str(error).split())
        raise DataError(f"{file.filename}: /{name} is damaged: {shorten(printable(reason), 120)}") from error


def _follow(file: h5py.File, name: str, left: int) -> Any:
    """Return the identifier of an object; links within the file are followed, links to other files are refused."""
    here: Any = file.id
    parts = [part for part in name.split("/") if part not in ("", ".")]
    for at, part in enumerate(parts):
        if not isinstance(here, h5py.h5g.GroupID) or not here.links.exists(part.encode()):
            return None
        kind = here.links.get_info(part.encode()).type
        if kind == h5py.h5l.TYPE_SOFT:
            if not left:
                raise DataError(f"{file.filename}: /{name} is a link that leads to too many others")
            target = here.links.get_val(part.encode()).decode("utf-8", "replace")
            before = "" if target.startswith("/") else "/".join(parts[:at])
            return _follow(file, "/".join([before, target, *parts[at + 1 :]]), left - 1)
        if kind != h5py.h5l.TYPE_HARD:
            raise DataError(f"{file.filename}: /{name} is a link to another file: {_ITSELF}")
        here = h5py.h5o.open(here, part.encode())
    return here


def _check_layout(file: h5py.File, dataset: h5py.h5d.DatasetID, name: str) -> None:
    """Refuse bytes in other files, and more bytes than the file can contain."""
    plist, where = dataset.get_create_plist(), f"{file.filename}: /{name}"
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        raise DataError(f"{where} is a virtual dataset: {_ITSELF}")
    if plist.get_external_count():
        raise DataError(f"{where} keeps its bytes in another file: {_ITSELF}")
    claimed = math.prod(dataset.shape) * dataset.dtype.itemsize
    if claimed > _DENSEST * dataset.get_storage_size() + _DENSEST:
        raise DataError(f"{where} claims {claimed} bytes and stores {dataset.get_storage_size()}: it was never written")
    offset = dataset.get_offset()
    if offset is not None and offset + claimed > (size := os.stat(file.filename).st_size):
        raise DataError(f"{where} claims {claimed} bytes at {offset}, the file has {size}: it is truncated")


def _names(file: h5py.File) -> list[str]:
    """Return the names of a few datasets; objects behind links are not opened."""
    names: list[str] = []

    def visit(key: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            names.append(key)
        return True if len(names) > 8 else None

    file.visititems(visit)
    return names


def attribute(item: Any, name: str, default: Any = None) -> Any:
    """Return an attribute as a plain Python value: text as ``str``, numbers as ``int`` or ``float``."""
    try:
        value = item.attrs.get(name, default)
    except (OSError, RuntimeError, TypeError, ValueError, LookupError) as error:
        raise DataError(f"{item.file.filename}: the attribute {name} is damaged") from error
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.generic):
        return value.item()
    if value is default or isinstance(value, str):
        return value
    raise DataError(f"{item.file.filename}: the attribute {name} holds {type(value).__name__}; expected one value")


def map_dataset(dataset: h5py.Dataset) -> Any:
    """Return the dataset as a read-only memory map; the dataset itself if its bytes are not contiguous in the file.

    A map needs no copy, no lock and no open handle, and all ranks of a node share its pages.
    """
    offset = dataset.id.get_offset()  # None if chunked, virtual, external or not yet allocated
    if offset is None or dataset.dtype.hasobject:
        return dataset
    return np.memmap(dataset.file.filename, dtype=dataset.dtype, mode="r", offset=offset, shape=dataset.shape)


def check_whole(array: Any, path: str) -> None:
    """Raise ``DataError`` if the mapped file has become shorter: an access beyond its end would kill the process."""
    file = getattr(array, "_mmap", None)
    if file is not None and file.size() < array.offset + array.nbytes:
        raise DataError(f"{path} was truncated while it was read: it has {file.size()} bytes; pack it again")


def checksum(dataset: h5py.Dataset, block: int = BLOCK) -> int:
    """Return the CRC-32 of a dataset's bytes in C order, read in blocks of elements along its first dimension."""
    rows = max(1, block // max(1, int(np.prod(dataset.shape[1:]))))
    crc32 = 0
    for start in range(0, len(dataset), rows):
        crc32 = zlib.crc32(np.ascontiguousarray(dataset[start : start + rows]).data, crc32)
    return crc32
