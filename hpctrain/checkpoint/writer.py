"""Write a checkpoint file: HDF5 lays it out, the bytes go straight from memory to their places.

Note: layout first, bytes second. HDF5 lays the file out in memory (``image``), every dataset contiguous, allocated at
once and never filled, with all attributes, checksums included; it tells where each dataset lies. Then structure and
bytes are written with ``pwrite`` at their offsets: at the disk's own speed, without HDF5's global lock, and from any
number of processes. The result is a plain HDF5 file.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import h5py
import numpy as np

from hpctrain._version import __version__
from hpctrain.checkpoint import layout
from hpctrain.checkpoint.attributes import Value, to_array
from hpctrain.checkpoint.image import Image
from hpctrain.checkpoint.layout import Array, Record
from hpctrain.checkpoint.manifest import digest, manifest
from hpctrain.checkpoint.seal import LENGTH, Extent, seal
from hpctrain.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """Say what goes into a dataset; ``load`` returns the array and is called once for the CRC, once to write.

    ``dtype`` is the torch name; the array has the storage type of ``layout.STORAGE`` for it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Array]
    attributes: Mapping[str, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str, array: Array, dtype: str | None = None, **attributes: Value) -> Source:
        """Describe an array that is at hand; ``dtype`` is needed where the array only stands in (bfloat16)."""
        return cls(path, array.shape, dtype or array.dtype.name, lambda: array, attributes)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that the dataset takes."""
        return math.prod(self.shape) * layout.storage_of(self.dtype, self.path).itemsize

    def bytes(self) -> memoryview:
        """Return the logical bytes, C order and little endian, without a copy where memory already holds them so."""
        storage, array = layout.storage_of(self.dtype, self.path), self.load()
        if array.shape != self.shape or array.dtype.newbyteorder("<") not in (storage, np.dtype(self.dtype_in_memory)):
            raise CheckpointError(
                f"{self.path} was announced as {self.dtype} {self.shape} and came as {array.dtype} {array.shape}"
            )
        plain = np.ascontiguousarray(array).reshape(-1)
        return plain.astype(storage, copy=False).view(np.uint8).data

    @property
    def dtype_in_memory(self) -> str:
        """Return NumPy's name of the element type: its bool takes the byte that the file stores."""
        return "bool" if self.dtype == "bool" else layout.STORAGE[self.dtype].str


def write_file(path: Path, sources: Iterable[Source], groups: Mapping[str, Mapping[str, Value]]) -> None:
    """Write a new file of tensors and of groups with their attributes (``"/"`` is the root), flushed to the disk.

    The groups above a dataset are made without being named. Nothing at ``path`` is overwritten. The bytes of the
    tensors must not change meanwhile.
    """
    sources = list(sources)
    records = [_record(source) for source in sources]
    image, offsets = _lay_out(records, _all_groups(groups, records))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.ftruncate(handle, image.size)
        for offset, part in image.parts():
            _write_at(handle, memoryview(part), offset)
        _pour(handle, sources, offsets)
        os.fsync(handle)  # by the descriptor that wrote: it is the one that hears of failures
    finally:
        os.close(handle)


def _record(source: Source) -> Record:
    crc = zlib.crc32(source.bytes())
    values: dict[str, Value] = {
        **source.attributes,
        layout.CRC32: np.uint32(crc),
        layout.TORCH_DTYPE: source.dtype,
    }
    attributes = {name: to_array(value) for name, value in values.items()}
    return Record(source.path, source.shape, source.dtype, crc, attributes)


def _all_groups(
    groups: Mapping[str, Mapping[str, Value]], records: Sequence[Record]
) -> dict[str, dict[str, Array]]:
    """Return the attributes of every group, each group after the one that holds it."""
    root: dict[str, Value] = {
        **groups.get("/", {}),
        "format": layout.FORMAT,
        "format_version": ".".join(map(str, layout.VERSION)),
        "creator": f"hpctrain {__version__}",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "complete": 1,
    }
    found: dict[str, dict[str, Array]] = {"/": {name: to_array(value) for name, value in root.items()}}
    for path in [*groups, *(record.path.rpartition("/")[0] for record in records)]:
        parts = path.strip("/").split("/") if path.strip("/") else []
        for depth in range(1, len(parts) + 1):
            group = "/" + "/".join(parts[:depth])
            if group not in found:
                found[group] = {name: to_array(value) for name, value in groups.get(group, {}).items()}
    return found


def _lay_out(
    records: Sequence[Record], groups: Mapping[str, Mapping[str, Array]]
) -> tuple[Image, list[int | None]]:
    """Return the file without the bytes of its tensors, and where each of them lies."""
    text, image = manifest(groups, records), Image()
    with h5py.File(
        image,
        "w",
        libver=("v110", "v110"),  # checksummed structure, and a torn file that refuses to open; read by HDF5 1.10
        alignment_threshold=layout.PAGE,
        alignment_interval=layout.PAGE,
        track_order=True,
    ) as file:
        for group, attributes in groups.items():
            _set_attributes(file if group == "/" else file.create_group(group, track_order=True), attributes)
        _set_attributes(file, {layout.DIGEST: to_array(digest(text))})
        datasets = [_dataset(file, record) for record in records]
        file.create_dataset(layout.MANIFEST, data=_text(text), track_times=False)
        sealed = file.create_dataset(layout.SEAL, data=_text("0" * LENGTH), track_times=False)
        file.flush()
        offsets = [dataset.id.get_offset() for dataset in datasets]
        place = sealed.id.get_offset()
        extents = [_extent(dataset) for dataset in [*datasets, file[layout.MANIFEST], sealed]]
    _put_seal(image, place, [extent for extent in extents if extent])
    return image, offsets


def _extent(dataset: h5py.Dataset) -> Extent | None:
    offset = dataset.id.get_offset()
    return None if offset is None else (offset, dataset.id.get_storage_size())


def _put_seal(image: Image, place: int, extents: Sequence[Extent]) -> None:
    """Write the seal to its place, now that HDF5 has closed the file and nothing else changes."""

    def read(offset: int, count: int) -> bytes:
        image.seek(offset)
        return image.read(count) or b""

    text = seal(image.size, extents, read)
    image.seek(place)
    image.write(text.encode())


def _dataset(file: h5py.File, record: Record) -> h5py.Dataset:
    """Create a dataset whose place in the file is fixed at once and whose bytes HDF5 never touches."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(record.shape) if record.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    kind = h5py.h5t.py_create(record.storage)
    dataset = h5py.Dataset(h5py.h5d.create(file.id, record.path.encode(), kind, space, dcpl=plist, lcpl=links))
    _set_attributes(dataset, record.attributes)
    return dataset


def _set_attributes(target: h5py.Group | h5py.Dataset, attributes: Mapping[str, Array]) -> None:
    for name, array in attributes.items():
        stored = array.dtype
        if stored.kind == "S":
            stored = h5py.string_dtype("utf-8", stored.itemsize)
        target.attrs.create(name, array.astype(stored), dtype=stored)


def _text(text: str) -> Array:
    array = to_array(text)
    return array.astype(h5py.string_dtype("utf-8", array.dtype.itemsize))


def _pour(handle: int, sources: Sequence[Source], offsets: Sequence[int | None]) -> None:
    """Write the tensors' bytes to their places."""
    for source, offset in zip(sources, offsets, strict=True):
        if offset is not None:
            _write_at(handle, source.bytes(), offset)
        elif source.nbytes:
            raise CheckpointError(f"HDF5 gave {source.path} no place in the file")


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        written = os.pwrite(handle, data[done : done + layout.PIECE], offset + done)
        if written == 0:
            raise CheckpointError(f"the filesystem took none of {len(data) - done} bytes at offset {offset + done}")
        done += written
