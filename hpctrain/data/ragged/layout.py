"""Layout of ragged data files, samples whose fields have different sizes, in HDF5; open files of a set.

A file has the groups ``/train`` and ``/validation``, or others. A field of a group is

* a dataset ``[n, ...]``, if its samples have one size;
* a group with ``values`` ``[total, ...]``, the rows of all samples one after the other, and ``offsets`` ``[n + 1]``:
  sample ``i`` has the rows ``offsets[i]`` to ``offsets[i + 1]``. If there are ``shapes`` ``[n, dims]``, ``values`` has
  one dim and the rows of a sample are reshaped, such as images of different sizes;
* a dataset of variable-length elements of HDF5.

The attribute ``kind`` of ``values`` is ``text`` (UTF-8) or ``bytes``; it may be absent.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import numpy.typing as npt

from hpctrain.data.hdf5 import attribute, dataset_of, find_dataset, open_file
from hpctrain.data.shards.files import Descriptor
from hpctrain.errors import DataError
from hpctrain.stage.local import staged
from hpctrain.util.text import counted, listed

FORMAT = "hpctrain-ragged"
VERSION = 1
Kind = Literal["", "text", "bytes", "objects"]  # objects: only in batches, not in files
NUMBERS = "biuf"  # kinds of element types: bool, integers, floats


@dataclass(frozen=True)
class StoredArray:
    """A dataset in a file; ``offset`` is that of its bytes, None if HDF5 must read it: it is chunked or compressed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int | None


@dataclass(frozen=True)
class Field:
    """A field of the samples in a file.

    A sample has the rows of ``values`` that ``offsets`` tell, times ``scale``; without them, the rows are ``stride``
    per sample, or one row is a whole sample (``stride`` 0). The shape of a sample is in ``shapes``; without them, in
    ``tail`` the dims after the first one, if ``values`` has been flattened.
    """

    name: str
    values: StoredArray
    offsets: StoredArray | None = None
    shapes: StoredArray | None = None
    kind: Kind = ""
    elements: str = ""  # element type of a dataset of variable-length elements
    stride: int = 0
    scale: int = 1
    tail: tuple[int, ...] | None = None

    @property
    def dtype(self) -> str:
        return self.elements or self.values.dtype

    @property
    def is_fixed(self) -> bool:
        return self.offsets is None and not self.elements and not self.stride

    @property
    def dims(self) -> int:
        """The number of dims of a sample."""
        if self.shapes is not None:
            return self.shapes.shape[1]
        return len(self.values.shape) - self.is_fixed

    @property
    def size(self) -> tuple[int, ...]:
        """The dims that all samples have alike: all, or those after the first."""
        return () if self.shapes is not None or self.elements else self.values.shape[1:]

    @property
    def samples(self) -> int:
        return self.values.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    def described(self) -> str:
        """Return the field in words."""
        if self.kind:
            return self.kind
        sizes = f"of size {list(self.size)}" if self.is_fixed else f"of different sizes in {counted(self.dims, 'dim')}"
        return f"{np.dtype(self.dtype).name} {sizes}"

    def by_rows(self) -> Field:
        """Return a field of one size as one whose samples may have different numbers of rows."""
        if not self.is_fixed:
            return self
        count, rows, *tail = self.values.shape
        return replace(self, values=replace(self.values, shape=(count * rows, *tail)), stride=rows)

    def by_elements(self) -> Field:
        """Return a field as one whose samples may differ in all dims."""
        if self.shapes is not None:
            return self
        size, whole = self.size, math.prod(self.values.shape)
        flat = replace(self.values, shape=(whole,))
        if self.is_fixed:
            return replace(self, values=flat, stride=math.prod(size), tail=size[1:])
        return replace(self, values=flat, scale=math.prod(size), tail=size)


def unified(fields: Sequence[Field]) -> list[Field] | None:
    """Return a field of several files in one form; None if its samples do not fit together."""
    first = fields[0]
    if any((each.dtype, each.kind, each.dims) != (first.dtype, first.kind, first.dims) for each in fields):
        return None
    if all(each.is_fixed == first.is_fixed and each.size == first.size for each in fields):
        if all((each.shapes is None, each.elements) == (first.shapes is None, first.elements) for each in fields):
            return list(fields)
    # Chunked data cannot be seen in another form.
    if any(each.elements or (each.shapes is None and each.values.offset is None) for each in fields):
        return None
    tails = {each.size[1:] if each.is_fixed else each.size for each in fields}
    if len(tails) == 1 and all(each.shapes is None for each in fields):
        return [each.by_rows() for each in fields]
    return [each.by_elements() for each in fields]


@dataclass(frozen=True)
class FileFacts:
    """A file of a data set: the number of its samples, where its fields are, and its state when that was read."""

    path: str
    size: int
    changed: int  # st_mtime_ns
    samples: int
    fields: Mapping[str, Field]


def read_facts(path: str | Path, group: str, wanted: Sequence[str] | Mapping[str, str] | None = None) -> FileFacts:
    """Return the facts of a group of a file; ``wanted`` are names of fields, or own names of them.

    Raises ``DataError`` if the file is missing or damaged, or has other contents.
    """
    place = staged(path)
    with open_file(path) as file:
        kind = attribute(file, "format", FORMAT)
        if kind != FORMAT:
            raise DataError(
                f"{path} is not a ragged file: its format attribute is {kind!r}, expected {FORMAT!r}; set data.format "
                "to that of the file"
            )
        version = attribute(file, "format_version", VERSION)
        if version != VERSION:
            raise DataError(f"{path} has format version {version!r}, this hpctrain reads {VERSION}")
        names = _names(file, group)
        chosen = dict(wanted) if isinstance(wanted, Mapping) else {name: name for name in wanted or names}
        unknown = [name for name in chosen.values() if name not in names]
        if unknown:
            raise DataError(f"{path}: /{group} has no field {unknown[0]}: it has {listed(names)}")
        fields = {own: _field(file, own, f"{group}/{name}") for own, name in chosen.items()}
        counts = {name: field.samples for name, field in fields.items()}
        if len(set(counts.values())) != 1:
            told = ", ".join(f"{count} of {name}" for name, count in counts.items())
            raise DataError(f"{path}: the fields of /{group} have different numbers of samples: {told}")
    status = os.stat(place)
    return FileFacts(str(path), status.st_size, status.st_mtime_ns, next(iter(counts.values())), fields)


def ragged_datasets(file: h5py.File) -> Iterator[tuple[str, int]]:
    """Yield the datasets of a ragged file, with the number of samples of their fields."""
    for group in file:
        for name in _names(file, group):
            field = _field(file, name, f"{group}/{name}")
            for block in (field.values, field.offsets, field.shapes):
                if block is not None:
                    yield block.name, field.samples


def _names(file: h5py.File, group: str) -> list[str]:
    """Return the names of the fields of a group."""
    found = file.get(group, getlink=True)
    if not isinstance(found, h5py.HardLink) or not isinstance(file[group], h5py.Group):
        groups = [name for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)]
        has = f"it has {listed(sorted(groups))}" if groups else "it is empty"
        raise DataError(f"{file.filename} has no group /{group}: {has}")
    names = sorted(name for name in file[group])
    if not names:
        raise DataError(f"{file.filename}: /{group} has no fields")
    return names


def _field(file: h5py.File, own: str, name: str) -> Field:
    """Return a field and check its layout; ``own`` is its name in samples."""
    dataset = find_dataset(file, name)
    if dataset is not None:
        return _plain(file, own, name, dataset)
    values, offsets = dataset_of(file, f"{name}/values"), dataset_of(file, f"{name}/offsets")
    shapes = find_dataset(file, f"{name}/shapes")
    where = f"{file.filename}: /{name}"
    if values.dtype.kind not in NUMBERS or values.ndim < 1:
        raise DataError(f"{where}/values is {values.dtype} with {values.ndim} dims, allowed are numbers with 1 or more")
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or len(offsets) < 1:
        raise DataError(f"{where}/offsets is {offsets.dtype} of shape {offsets.shape}, allowed are integers [n + 1]")
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(values):
        raise DataError(
            f"{where}/offsets begins with {int(offsets[0])} and ends with {int(offsets[-1])}, expected are 0 and the "
            f"number of values, {len(values)}"
        )
    if shapes is not None and (shapes.dtype.kind not in "iu" or shapes.ndim != 2 or len(shapes) != len(offsets) - 1):
        raise DataError(
            f"{where}/shapes is {shapes.dtype} of shape {shapes.shape}, allowed are integers [{len(offsets) - 1}, dims]"
        )
    if shapes is not None and values.ndim != 1:
        raise DataError(f"{where}/values has {values.ndim} dims beside shapes, allowed is 1")
    kind = attribute(values, "kind", "")
    if kind not in ("", "text", "bytes"):
        raise DataError(f"{where}/values has the kind {kind!r}, allowed are text and bytes")
    return Field(
        own,
        _block(file, f"{name}/values", values),
        _block(file, f"{name}/offsets", offsets),
        None if shapes is None else _block(file, f"{name}/shapes", shapes),
        kind,
    )


def _plain(file: h5py.File, own: str, name: str, dataset: h5py.Dataset) -> Field:
    """Return a field that is a dataset, of one size or of variable-length elements."""
    where = f"{file.filename}: /{name}"
    if dataset.ndim < 1:
        raise DataError(f"{where} is a single value, allowed are datasets with samples first")
    text = h5py.check_string_dtype(dataset.dtype)
    elements = h5py.check_vlen_dtype(dataset.dtype)
    if text is not None and dataset.ndim == 1:
        return Field(own, _block(file, name, dataset), kind="text", elements="uint8")
    if elements is not None and dataset.ndim == 1 and elements.kind in NUMBERS:
        return Field(own, _block(file, name, dataset), elements=elements.str)
    if dataset.dtype.kind not in NUMBERS:
        raise DataError(
            f"{where} is {dataset.dtype} with {dataset.ndim} dims, allowed are numbers, and texts with 1 dim"
        )
    return Field(own, _block(file, name, dataset))


def _block(file: h5py.File, name: str, dataset: h5py.Dataset) -> StoredArray:
    offset = None if dataset.dtype.hasobject else dataset.id.get_offset()
    return StoredArray(name, dataset.dtype.str, tuple(map(int, dataset.shape)), offset)


# Open files ----------------------------------------------------------------------------------------------------------

MOST_OPEN = 256
Array = npt.NDArray[Any]


class OpenFile:
    """A file that is read at random places; ``facts`` are those that the data set knows.

    It is closed when the last reference to it is gone: a batch may have samples of more files than stay open.
    """

    def __init__(self, facts: FileFacts) -> None:
        self.facts = facts
        self._descriptor = Descriptor(facts.path)
        self._place, self._handle = staged(facts.path), self._descriptor.handle
        # A copy on this node has a time of its own.
        self._changed = self._descriptor.mtime_ns if self._descriptor.is_copy else facts.changed
        self.process = os.getpid()
        self._file: h5py.File | None = None
        self._views: dict[str, Array] = {}
        self.check()
        self._map = mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ)

    def check(self) -> None:
        """Raise ``DataError`` if the file has changed since the data set was opened."""
        now = os.fstat(self._handle)
        if (now.st_size, now.st_mtime_ns) != (self.facts.size, self._changed):
            raise DataError(
                f"{self.facts.path} changed while it was read: its size or its time differs; start again with the new "
                "file"
            )

    def view(self, block: StoredArray) -> Array | None:
        """Return a dataset as an array in the mapped file; None if HDF5 must read it."""
        if block.offset is None:
            return np.empty(block.shape, block.dtype) if 0 in block.shape and block.dtype != "|O" else None
        found = self._views.get(block.name)
        if found is None or found.shape != block.shape:
            count = int(np.prod(block.shape, dtype=np.int64))
            flat = np.frombuffer(self._map, np.dtype(block.dtype), count, block.offset)
            found = self._views[block.name] = flat.reshape(block.shape)
        return found

    def dataset(self, block: StoredArray) -> h5py.Dataset:
        """Return a dataset that HDF5 must read."""
        if self._file is None:
            self._file = h5py.File(self._place, "r", locking=False)
        return self._file[block.name]

    def read(self, out: Array, offset: int) -> None:
        """Fill an array from the bytes at an offset of the file."""
        self._descriptor.fill(out, offset)


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
        self._opened.pop(number, None)  # of the process from which this one was forked
        self._opened[number] = found = self._open(self._facts[number])
        while len(self._opened) > MOST_OPEN:
            self._opened.popitem(last=False)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": OrderedDict()}
