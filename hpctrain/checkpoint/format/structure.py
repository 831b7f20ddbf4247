"""Traversal of an untrusted file: returns its contents or refuses it.

Note: access to other files. HDF5 follows external storage, external links and virtual datasets to
other files, and loads plugins for filters, as soon as an object is read. So each link is examined
before it is followed, and the layout of a dataset before its shape is read. Sizes are compared with
the size of the file before memory is allocated. The structure as a whole has a limit of its own,
because a file with holes may claim any size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import JSON_SUFFIX, Array, Range, Record, Value, overlap
from hpctrain.errors import CheckpointError

_DEEPEST = 8
_MOST = 256 << 20  # bytes of attributes and names in memory; GPT-3 with its optimizer needs less than 10 MiB
_EACH = 512  # bytes of overhead in memory per object or attribute
_ELEMENTS = 1 << 62  # bytes of the product of all dimensions without zeros, as NumPy computes it
_NUMBERS = ("<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "<u2", "<u4")
_TYPES = {kind: h5py.h5t.py_create(np.dtype(kind)) for kind in _NUMBERS}
# Candidates by a type's class and size: a few comparisons instead of one per known type.
_CANDIDATES: dict[tuple[int, int], list[str]] = {}
for _name, _known in _TYPES.items():
    _CANDIDATES.setdefault((_known.get_class(), _known.get_size()), []).append(_name)
_LAYOUTS = {h5py.h5d.COMPACT: "compact", h5py.h5d.CHUNKED: "chunked", h5py.h5d.VIRTUAL: "virtual"}


@dataclass
class Structure:
    """Structure of a file: attributes per group, a record per tensor, a range of bytes per dataset, and checksums."""

    groups: dict[str, dict[str, Array]] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    ranges: dict[str, Range] = field(default_factory=dict)  # no entry for a dataset without elements
    texts: dict[str, str] = field(default_factory=dict)  # manifest and seal
    table: layout.Table | None = None


def walk(file: h5py.File, name: str, size: int, most: int = _MOST) -> Structure:
    """Return the structure of an open file of ``size`` bytes; ``name`` identifies it in errors.

    Its attributes and names may take ``most`` bytes of memory.
    """
    walker = _Walker(name, size, most)
    walker.seen.add(h5py.h5o.get_info(file.id).addr)
    walker.group(file.id, "/", 0)
    shared = overlap(walker.found.ranges.values())
    if shared:
        raise CheckpointError(f"{name}: two datasets share the bytes at {shared[0]}: not what hpctrain writes, refused")
    return walker.found


def read_attribute(attribute: h5py.h5a.AttrID, key: str, where: str, limit: int) -> Array:
    """Return an attribute of at most ``limit`` bytes as stored; refuse types that a checkpoint does not use."""
    kind, what = attribute.get_type(), f"attribute {key!r} of {where}"
    dtype, shape = _element_type(kind, what), _extent(attribute.get_space(), what)
    if math.prod(shape) * dtype.itemsize > limit:
        raise CheckpointError(f"{where}: attribute {key!r} claims more bytes than the file has or structure may take")
    array: Array = np.empty(shape, dtype=dtype)
    attribute.read(array, mtype=kind)
    return array


class _Walker:
    """Traversal with its limits: each object once, bytes up to the size of the file, a bounded structure."""

    def __init__(self, name: str, size: int, most: int) -> None:
        self.name, self.size, self.left, self.most = name, size, size, most
        self.memory_left = most
        self.seen: set[int] = set()
        self.found = Structure()

    def group(self, group: h5py.h5g.GroupID, path: str, depth: int) -> None:
        if depth > _DEEPEST:
            raise self._refusal(path, f"is more than {_DEEPEST} groups deep")
        self.found.groups[path] = self._attributes(group, path)
        with refusing(f"{self.name}: {path}"):
            for name in h5py.Group(group):
                _checked_name(name, f"in {path} of {self.name}")
                self._member(group, name, f"{path.rstrip('/')}/{name}", depth)

    def _member(self, group: h5py.h5g.GroupID, name: str, path: str, depth: int) -> None:
        link = group.links.get_info(name.encode())
        if link.type != h5py.h5l.TYPE_HARD:
            word = {h5py.h5l.TYPE_SOFT: "a soft link", h5py.h5l.TYPE_EXTERNAL: "an external link"}
            raise self._refusal(path, f"is {word.get(link.type, 'a link of unknown kind')}")
        self._check_unseen(link.u, path)
        with refusing(f"{self.name}: {path}"):
            member = h5py.h5o.open(group, name.encode())
        if isinstance(member, h5py.h5g.GroupID):
            self.group(member, path, depth + 1)
        elif isinstance(member, h5py.h5d.DatasetID):
            with refusing(f"{self.name}: {path}"):
                self._dataset(member, path)
        else:
            raise self._refusal(path, "is neither a group nor a dataset")

    def _dataset(self, dataset: h5py.h5d.DatasetID, path: str) -> None:
        self._check_layout(dataset, path)
        dtype = _element_type(dataset.get_type(), f"{self.name}: {path}")
        shape = _extent(dataset.get_space(), f"{self.name}: {path}")
        nbytes, offset = math.prod(shape) * dtype.itemsize, dataset.get_offset()
        if nbytes > self.left or (offset is not None and offset + nbytes > self.size):
            raise self._refusal(path, f"claims {nbytes} bytes, more than a file of {self.size} bytes can hold")
        if nbytes and offset is None:
            raise self._refusal(path, "was never written")
        if math.prod(map(float, filter(None, shape))) * dtype.itemsize >= _ELEMENTS:
            raise self._refusal(path, f"claims the shape {shape}")
        self.left -= nbytes
        if nbytes:
            self.found.ranges[path] = offset, nbytes
        attributes = self._attributes(dataset, path)
        if path in (layout.MANIFEST, layout.SEAL, layout.EXTENTS):
            self._read_checksums(dataset, path, dtype, shape, attributes)
        else:
            self.found.records[path] = self._record(path, dtype, shape, attributes)

    def _check_layout(self, dataset: h5py.h5d.DatasetID, path: str) -> None:
        plist = dataset.get_create_plist()
        kind = plist.get_layout()
        if kind == h5py.h5d.VIRTUAL:
            raise self._refusal(path, "is a virtual dataset")
        if plist.get_external_count():
            raise self._refusal(path, "keeps its bytes in another file (external storage)")
        if plist.get_nfilters():
            raise self._refusal(path, "passes through a filter")
        if kind != h5py.h5d.CONTIGUOUS:
            raise self._refusal(path, f"is stored {_LAYOUTS.get(kind, 'in an unknown way')}")

    def _read_checksums(
        self,
        dataset: h5py.h5d.DatasetID,
        path: str,
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
        attributes: Mapping[str, Array],
    ) -> None:
        """Read the manifest, the seal or the table of extents; the reader checks whether the table fits the tensors."""
        is_table, count = path == layout.EXTENTS, len(layout.COLUMNS)
        if is_table:
            what, fits = f"a table of {count} columns", dtype == np.dtype("<i8") and shape[1:] == (count,)
        else:
            what, fits = "one text", dtype.kind == "S" and not shape
        if attributes or not fits:
            raise self._refusal(path, f"is not {what} without attributes")
        self._count_memory(path, math.prod(shape) * dtype.itemsize)
        array = np.empty(shape, dtype=dtype)
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, array, mtype=dataset.get_type())
        if is_table:
            self.found.table = array.astype(np.int64, copy=False)
        else:
            self.found.texts[path] = array.tobytes().rstrip(b"\0").decode()

    def _record(
        self, path: str, dtype: np.dtype[np.generic], shape: tuple[int, ...], attributes: Mapping[str, Array]
    ) -> Record:
        crc, name = attributes.get(layout.CRC32), attributes.get(layout.TORCH_DTYPE)
        if crc is None or crc.shape or crc.dtype != np.dtype("<u4"):
            raise self._refusal(path, f"lacks the attribute {layout.CRC32}")
        if name is None or name.shape or name.dtype.kind != "S":
            raise self._refusal(path, f"lacks the attribute {layout.TORCH_DTYPE}")
        word = name.tobytes().rstrip(b"\0").decode()
        if word not in layout.STORAGE or layout.STORAGE[word] != dtype:  # NumPy takes None for float64
            raise self._refusal(path, f"has the dtype {word!r}, stored as {dtype.str}: no such pair is known")
        return Record(path, shape, word, int(crc[()]), attributes)

    def _attributes(self, target: h5py.h5g.GroupID | h5py.h5d.DatasetID, path: str) -> dict[str, Array]:
        where, found = f"{self.name}: {path}", {}
        with refusing(where):
            # By index, and by HDF5's low-level API: h5py's takes several times as long, and a model has thousands.
            for number in range(h5py.h5a.get_num_attrs(target)):
                attribute = h5py.h5a.open(target, index=number)
                key = _checked_name(attribute.name, f"of {where}")
                found[key] = read_attribute(attribute, key, where, min(self.left, self.memory_left))
                self.left -= found[key].nbytes
                self._count_memory(path, found[key].nbytes + len(key))
        return found

    def _count_memory(self, path: str, nbytes: int) -> None:
        """Count the memory of an object or attribute; raise if the limit is exceeded."""
        self.memory_left -= nbytes + _EACH
        if self.memory_left < 0:
            raise self._refusal(path, f"and what comes before it take more than {self.most} bytes besides the tensors")

    def _check_unseen(self, address: int, path: str) -> None:
        if address in self.seen:
            raise self._refusal(path, "is a second name of another object")
        self.seen.add(address)
        self._count_memory(path, len(path))

    def _refusal(self, path: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {path} {reason}: not what hpctrain writes, refused")


@contextmanager
def refusing(what: object) -> Iterator[None]:
    """Convert the errors of HDF5 and of decoding to a ``CheckpointError`` that names the damaged object."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, OverflowError) as error:
        reason = " ".join(str(error.args[0] if error.args else "").split()) or type(error).__name__
        raise CheckpointError(f"{what} is damaged or torn: {reason}") from error


def _checked_name(name: str | bytes, where: str) -> str:
    """Return the name of a member or an attribute as text, if it is valid in a checkpoint."""
    try:
        text = name.decode() if isinstance(name, bytes) else name  # h5py returns bytes if it cannot decode them
    except UnicodeDecodeError:
        raise CheckpointError(f"the name {name[:80]!r} {where} cannot be stored: it is not UTF-8") from None
    layout.check_name(text, where)
    return text


def _element_type(kind: h5py.h5t.TypeID, what: str) -> np.dtype[np.generic]:
    """Return the NumPy type of an allowed HDF5 type; the match is exact, so that HDF5 converts nothing."""
    if not kind.committed():
        if isinstance(kind, h5py.h5t.TypeStringID) and not kind.is_variable_str():
            return np.dtype(f"S{kind.get_size()}")
        for name in _CANDIDATES.get((kind.get_class(), kind.get_size()), ()):
            if kind.equal(_TYPES[name]):
                return np.dtype(name)
    raise CheckpointError(f"{what} has a type that no checkpoint holds, refused")


def _extent(space: h5py.h5s.SpaceID, what: str) -> tuple[int, ...]:
    if space.get_simple_extent_type() not in (h5py.h5s.SCALAR, h5py.h5s.SIMPLE):
        raise CheckpointError(f"{what} has no extent, refused")
    return tuple(space.shape)


def unpack(attributes: Mapping[str, Array], file: object) -> dict[str, Any]:
    """Return the argument of ``pack``; tuples become lists."""
    values: dict[str, Any] = {}
    for name, array in attributes.items():
        value = from_array(array)
        if name.endswith(JSON_SUFFIX):
            values[name.removesuffix(JSON_SUFFIX)] = _from_json(value, f"{file}: attribute {name}")
        else:
            values[name] = value
    return values


def from_array(array: Array) -> Value:
    """Return the argument of ``to_array``."""
    if array.dtype.kind != "S":
        value: Value = np.uint32(array.item()) if array.dtype == np.uint32 else array.item()
        return value
    if array.ndim == 0:
        return bytes(array[()]).decode()
    return tuple(bytes(text).decode() for text in array)


def _from_json(text: Value, where: str) -> Any:
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
