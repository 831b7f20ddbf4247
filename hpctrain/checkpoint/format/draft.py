"""Layout of a checkpoint in memory: HDF5 assigns all offsets before any byte of a tensor is written.

Note: HDF5 never touches the disk. On a full disk, or beyond a quota, HDF5 may report success, or
crash the process when it closes the file. So HDF5 writes the layout to such an image, which cannot
fail, and the bytes reach the disk by system calls whose errors hpctrain handles. The ranges of the
tensors are holes here and take no memory.
"""

from __future__ import annotations

import io
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache, lru_cache
from itertools import islice
from typing import Any

import h5py
import numpy as np

from hpctrain._version import __version__
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import (
    JSON_SUFFIX,
    SEAL_LENGTH,
    Array,
    Groups,
    Record,
    Value,
    Written,
    check_name,
    digest,
    manifest,
    outside,
    seal,
)
from hpctrain.checkpoint.format.plan import WriteRequest
from hpctrain.errors import UsageError
from hpctrain.shard import Shard

_BLOCK = 4096


class Image(io.RawIOBase):
    """File object in memory for reading and writing; bytes that were never written read as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[int, bytearray] = {}
        self._position = 0
        self.size = 0

    def parts(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of the written blocks within ranges (offset and length); the rest are holes."""
        numbers = sorted(self._blocks)
        for offset, count in ranges:
            end = min(offset + count, self.size)
            for number in islice(numbers, bisect_left(numbers, offset // _BLOCK), None):
                start = number * _BLOCK
                if start >= end:
                    break
                low, high = max(start, offset), min(start + _BLOCK, end)
                yield low, bytes(self._blocks[number][low - start : high - start])

    def written(self, offset: int, count: int) -> int:
        """Return the number of bytes up to the end of the last written block; the rest of the range is a hole."""
        first, behind = offset // _BLOCK, -(-(offset + count) // _BLOCK)
        last = next((number for number in reversed(range(first, behind)) if number in self._blocks), None)
        return 0 if last is None else min(count, (last + 1) * _BLOCK - offset)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        return self._position

    def truncate(self, size: int | None = None) -> int:
        """Set the size; bytes beyond it are discarded."""
        self.size = self._position if size is None else size
        for number in [number for number in self._blocks if number * _BLOCK >= self.size]:
            del self._blocks[number]
        if self.size // _BLOCK in self._blocks:
            block = self._blocks[self.size // _BLOCK]
            block[self.size % _BLOCK :] = bytes(_BLOCK - self.size % _BLOCK)
        return self.size

    def readinto(self, buffer: object) -> int:
        """Fill a buffer from the current position; return the number of bytes read."""
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(target), self.size - self._position))
        for number, inside, done, length in self._spans(count):
            block = self._blocks.get(number)
            target[done : done + length] = bytes(length) if block is None else block[inside : inside + length]
        self._position += count
        return count

    def write(self, data: object) -> int:
        """Write bytes at the current position; return their number."""
        source = memoryview(data).cast("B")  # type: ignore[arg-type]
        for number, inside, done, length in self._spans(len(source)):
            block = self._blocks.setdefault(number, bytearray(_BLOCK))
            block[inside : inside + length] = source[done : done + length]
        self._position += len(source)
        self.size = max(self.size, self._position)
        return len(source)

    def _spans(self, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield block, offset in the block, bytes done so far and bytes in the block, for a range from the position."""
        done = 0
        while done < count:
            number, inside = divmod(self._position + done, _BLOCK)
            length = min(count - done, _BLOCK - inside)
            yield number, inside, done, length
            done += length


# Draft of a file ------------------------------------------------------------------------------------------------------
#
# Every dataset is contiguous, allocated at once and never filled by HDF5. The offsets of the tensors
# are known as soon as the draft is made. Their checksums are known when the bytes are written, and
# complete the draft.


class Draft:
    """Structure of a file that is being written.

    ``offsets`` contains the offset of each dataset, in the given order; ``None`` for a dataset
    without bytes.
    """

    def __init__(self, request: WriteRequest) -> None:
        """Make the layout of the datasets and groups of a request.

        The groups above a dataset are created implicitly. Datasets are created first, and groups
        get their attributes last: a dataset's offset therefore depends only on itself and the
        datasets before it, whatever else the file contains.
        """
        self.records = [_record(dataset, request.attributes.get(dataset.name, {})) for dataset in request.datasets]
        self._groups = _all_groups(request.groups, self.records)
        self._image = Image()
        self._file = h5py.File(
            self._image,
            "w",
            libver=("v110", "v110"),  # checksummed structure; a torn file fails to open; readable by HDF5 1.10
            alignment_threshold=request.alignment,
            alignment_interval=request.alignment,
            track_order=True,
        )
        self._groups_made = {"": self._file.id}
        datasets_made = [_dataset(self._group(record.path.rpartition("/")[0]), record) for record in self.records]
        for path, values in self._groups.items():
            _set_attributes(self._group(path.rstrip("/")), values)
        self.offsets: list[int | None] = [dataset.get_offset() for dataset in datasets_made]
        self._crcs = [h5py.h5a.open(dataset, layout.CRC32.encode()) for dataset in datasets_made]
        self._text = self._create_text(layout.MANIFEST, len(self._manifest().encode()))
        self._seal = self._create_text(layout.SEAL, SEAL_LENGTH)
        rows = sum(layout.rows_of(record.nbytes) for record in self.records)
        space = h5py.h5s.create_simple((rows, len(layout.COLUMNS)))
        self._table = _create(self._file.id, layout.EXTENTS, h5py.h5t.STD_I64LE, space).get_offset()
        _set_attributes(self._file.id, {layout.DIGEST: to_array(digest(""))})

    def _group(self, path: str) -> h5py.h5g.GroupID:
        """Return a group; create it and its parents if it does not exist yet."""
        if path not in self._groups_made:
            above, _, name = path.rpartition("/")
            self._groups_made[path] = h5py.h5g.create(self._group(above), name.encode(), *_group_lists())
        return self._groups_made[path]

    def close(self) -> None:
        """Discard a draft that will not be completed."""
        if self._file:
            self._file.close()

    @property
    def size(self) -> int:
        """Return the size of the completed file in bytes."""
        return self._image.size

    def finish(self, written: Written) -> Iterator[tuple[int, bytes]]:
        """Return offset and bytes of everything but the tensors, given offset, length and CRC-32 of all written ranges.

        Raises ``CheckpointError`` unless each byte of all tensors was written exactly once.
        """
        tensors = [(offset, record.nbytes) for offset, record in zip(self.offsets, self.records) if offset is not None]
        table = layout.table_of(tensors, written)
        self._set_checksums(table, len(tensors))
        text = self._manifest()
        stored = to_array(digest(text))
        h5py.h5a.open(self._file.id, layout.DIGEST.encode()).write(stored, mtype=_string_type(stored.dtype.itemsize))
        self._file.close()
        self._put(self._text, text.encode())
        if self._table is not None:  # without rows it has no bytes
            self._put(self._table, table.tobytes())
        checked = [*tensors, (self._text, len(text.encode())), (self._seal, SEAL_LENGTH)]
        self._put(self._seal, seal(self._image.size, checked, self._read).encode())
        return self._image.parts(outside(self._image.size, tensors))

    def _set_checksums(self, table: layout.Table, count: int) -> None:
        order = sorted((offset, number) for number, offset in enumerate(self.offsets) if offset is not None)
        for (_, number), found in zip(order, layout.by_tensor(table, count), strict=True):
            crc = layout.combined((extent.crc32, extent.nbytes) for extent in found)
            array = to_array(np.uint32(crc))
            self._crcs[number].write(array)
            record = self.records[number]
            self.records[number] = replace(record, crc32=crc, attributes={**record.attributes, layout.CRC32: array})

    def _manifest(self) -> str:
        return manifest(self._groups, self.records)

    def _create_text(self, path: str, length: int) -> int:
        return int(_create(self._file.id, path, _string_type(length), _scalar()).get_offset())

    def _put(self, offset: int, data: bytes) -> None:
        self._image.seek(offset)
        self._image.write(data)

    def _read(self, offset: int, count: int) -> bytes:
        self._image.seek(offset)
        return self._image.read(self._image.written(offset, count)) or b""


def _record(dataset: Shard, more: Mapping[str, Value]) -> Record:
    values: dict[str, Value] = {**more, layout.CRC32: np.uint32(0), layout.TORCH_DTYPE: dataset.dtype}
    attributes = {name: to_array(value) for name, value in values.items()}
    layout.storage_of(dataset.dtype, dataset.name)
    return Record(dataset.name, dataset.shape, dataset.dtype, 0, attributes)


def _all_groups(groups: Groups, records: Sequence[Record]) -> dict[str, dict[str, Array]]:
    """Return the attributes of every group, each group after its parent."""
    version = layout.version_for(groups, (record.path for record in records))
    root: dict[str, Value] = {
        **groups.get("/", {}),
        "format": layout.FORMAT,
        "format_version": ".".join(map(str, version)),
        "creator": f"hpctrain {__version__}",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "complete": 1,
    }
    found: dict[str, dict[str, Array]] = {"/": {name: to_array(value) for name, value in root.items()}}
    for path in dict.fromkeys([*groups, *(record.path.rpartition("/")[0] for record in records)]):
        parts = path.strip("/").split("/") if path.strip("/") else []
        for depth in range(1, len(parts) + 1):
            group = "/" + "/".join(parts[:depth])
            if group not in found:
                found[group] = {name: to_array(value) for name, value in groups.get(group, {}).items()}
    return found


def _dataset(group: h5py.h5g.GroupID, record: Record) -> h5py.h5d.DatasetID:
    space = h5py.h5s.create_simple(record.shape) if record.shape else _scalar()
    dataset = _create(group, record.path.rpartition("/")[2], _number_type(record.storage), space)
    _set_attributes(dataset, record.attributes)
    return dataset


def _create(group: h5py.h5g.GroupID, name: str, kind: h5py.h5t.TypeID, space: h5py.h5s.SpaceID) -> h5py.h5d.DatasetID:
    """Create a dataset that is allocated at once and whose bytes HDF5 never touches."""
    plist, links = _property_lists()
    return h5py.h5d.create(group, name.encode(), kind, space, dcpl=plist, lcpl=links)


@cache
def _property_lists() -> tuple[h5py.h5p.PropDCID, h5py.h5p.PropLCID]:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    return plist, links


def _set_attributes(target: h5py.h5g.GroupID | h5py.h5d.DatasetID, attributes: Mapping[str, Array]) -> None:
    """Create attributes by HDF5's low-level API: h5py's takes several times as long, and a model has thousands."""
    for name, array in attributes.items():
        kind = _string_type(array.dtype.itemsize) if array.dtype.kind == "S" else _number_type(array.dtype)
        space = h5py.h5s.create_simple(array.shape) if array.shape else _scalar()
        h5py.h5a.create(target, name.encode(), kind, space).write(array, mtype=kind)


@cache
def _group_lists() -> tuple[h5py.h5p.PropLCID, h5py.h5p.PropGCID]:
    order = h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED
    plist = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    plist.set_link_creation_order(order)
    plist.set_attr_creation_order(order)
    return _property_lists()[1], plist


@cache
def _scalar() -> h5py.h5s.SpaceID:
    return h5py.h5s.create(h5py.h5s.SCALAR)


@cache
def _number_type(dtype: np.dtype[np.generic]) -> h5py.h5t.TypeID:
    return h5py.h5t.py_create(dtype)


@lru_cache(maxsize=64)
def _string_type(length: int) -> h5py.h5t.TypeStringID:
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(length)
    kind.set_cset(h5py.h5t.CSET_UTF8)
    kind.set_strpad(h5py.h5t.STR_NULLPAD)
    return kind


# Conversion of Python values to HDF5 attributes; ``structure.unpack`` converts them back ------------------------------


_INT64 = range(-(1 << 63), 1 << 63)


def to_array(value: Value) -> Array:
    """Return the value exactly as the file stores it."""
    if isinstance(value, np.uint32):
        return np.array(value, dtype="<u4")
    if isinstance(value, int):
        return np.array(value, dtype="<i8")
    if isinstance(value, float):
        return np.array(value, dtype="<f8")
    texts = [_encode(value)] if isinstance(value, str) else [_encode(text) for text in value]
    length = max([1, *map(len, texts)])  # HDF5 has no text of length 0
    return np.array(texts[0] if isinstance(value, str) else texts, dtype=f"S{length}")


def pack(values: Mapping[str, Any], what: str) -> dict[str, Value]:
    """Return the attributes that store a mapping; ``what`` names it in the error for an unsupported value."""
    attributes: dict[str, Value] = {}
    for name, value in values.items():
        check_name(name, f"of {what}")
        if name.endswith(JSON_SUFFIX):
            raise UsageError(f"the name {name!r} of {what} must not end in {JSON_SUFFIX}: that marks JSON text")
        plain = value.item() if isinstance(value, np.generic) else value
        if isinstance(plain, str):
            plain = str(plain)  # to unpickle a subclass, such as torch's version, would import its package
        if _is_plain(plain):
            attributes[name] = plain
        else:
            attributes[name + JSON_SUFFIX] = _to_json(plain, f"{name} of {what}")
    return attributes


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" not in value
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and value in _INT64)


def _encode(text: str) -> bytes:
    if "\0" in text:
        raise UsageError(f"the text {text[:40]!r} holds a NUL: an attribute cannot store it")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text {text[:40]!r} is not valid Unicode: {error.reason}") from error


def _to_json(value: Any, what: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{what} is of type {type(value).__name__} and cannot be stored ({error}): allowed are numbers, text, "
            "true and false, None, and lists and dicts of them"
        ) from error
