"""Walk through a file that nobody vouches for, and return what it holds or refuse it.

Note: what could reach outside. HDF5 follows external storage, external links and virtual datasets to other files, and
loads plugins for filters, as soon as an object is read. So each link is looked at before it is followed, and the
layout of a dataset before its shape is asked for. Sizes are checked against the file before memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import h5py
import numpy as np

from hpctrain.checkpoint import layout
from hpctrain.checkpoint.layout import Array, Record
from hpctrain.errors import CheckpointError

_DEEPEST = 8
_NUMBERS = ("<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "<u2", "<u4")
_TYPES = {kind: h5py.h5t.py_create(np.dtype(kind)) for kind in _NUMBERS}
_LAYOUTS = {h5py.h5d.COMPACT: "compact", h5py.h5d.CHUNKED: "chunked", h5py.h5d.VIRTUAL: "virtual"}


@dataclass
class Structure:
    """Hold what a walk found: attributes of each group, a record and an offset for each tensor, the manifest."""

    groups: dict[str, dict[str, Array]] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)  # none for a tensor without elements
    manifest: str | None = None


def walk(file: h5py.File, name: str, size: int) -> Structure:
    """Return the structure of an open file of ``size`` bytes; ``name`` is how errors call it."""
    walker = _Walker(name, size)
    walker.group(file.id, "/", 0)
    return walker.found


def read_attribute(target: h5py.h5g.GroupID | h5py.h5d.DatasetID, key: str, where: str, limit: int) -> Array:
    """Return an attribute of at most ``limit`` bytes as it lies in the file; refuse types that a checkpoint lacks."""
    attribute = h5py.h5a.open(target, key.encode())
    dtype = _element_type(attribute.get_type(), f"attribute {key!r} of {where}")
    shape = _extent(attribute.get_space(), f"attribute {key!r} of {where}")
    if math.prod(shape) * dtype.itemsize > limit:
        raise CheckpointError(f"{where}: attribute {key!r} claims more bytes than the file has")
    array: Array = np.empty(shape, dtype=dtype)
    attribute.read(array, mtype=attribute.get_type())
    return array


class _Walker:
    """Carry what is still allowed: each object once, and no more bytes in all than the file has."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.left = name, size, size
        self.seen: set[int] = set()
        self.found = Structure()

    def group(self, group: h5py.h5g.GroupID, path: str, depth: int) -> None:
        if depth > _DEEPEST:
            raise self._refusal(path, f"lies more than {_DEEPEST} groups deep")
        self._once(group, path)
        self.found.groups[path] = self._attributes(group, path)
        for name in h5py.Group(group):
            layout.check_name(name, f"in {path} of {self.name}")
            self._member(group, name, f"{path.rstrip('/')}/{name}", depth)

    def _member(self, group: h5py.h5g.GroupID, name: str, path: str, depth: int) -> None:
        kind = group.links.get_info(name.encode()).type
        if kind != h5py.h5l.TYPE_HARD:
            word = {h5py.h5l.TYPE_SOFT: "a soft link", h5py.h5l.TYPE_EXTERNAL: "an external link"}
            raise self._refusal(path, f"is {word.get(kind, 'a link of unknown kind')}")
        with refusing(f"{self.name}: {path}"):
            member = h5py.h5o.open(group, name.encode())
        if isinstance(member, h5py.h5g.GroupID):
            self.group(member, path, depth + 1)
        elif isinstance(member, h5py.h5d.DatasetID):
            self._once(member, path)
            self._dataset(member, path)
        else:
            raise self._refusal(path, "is neither a group nor a dataset")

    def _dataset(self, dataset: h5py.h5d.DatasetID, path: str) -> None:
        with refusing(f"{self.name}: {path}"):
            self._examine(dataset, path)

    def _examine(self, dataset: h5py.h5d.DatasetID, path: str) -> None:
        self._check_layout(dataset, path)
        dtype = _element_type(dataset.get_type(), f"{self.name}: {path}")
        shape = _extent(dataset.get_space(), f"{self.name}: {path}")
        nbytes, offset = math.prod(shape) * dtype.itemsize, dataset.get_offset()
        if nbytes > self.left or (offset is not None and offset + nbytes > self.size):
            raise self._refusal(path, f"claims {nbytes} bytes, more than a file of {self.size} bytes can hold")
        if nbytes and offset is None:
            raise self._refusal(path, "was never written")
        self.left -= nbytes
        attributes = self._attributes(dataset, path)
        if path == layout.MANIFEST:
            self._keep_manifest(dataset, dtype, shape, attributes)
            return
        if offset is not None:
            self.found.offsets[path] = offset
        self.found.records[path] = self._record(path, dtype, shape, attributes)

    def _check_layout(self, dataset: h5py.h5d.DatasetID, path: str) -> None:
        plist = dataset.get_create_plist()
        if plist.get_layout() == h5py.h5d.VIRTUAL:
            raise self._refusal(path, "is a virtual dataset")
        if plist.get_external_count():
            raise self._refusal(path, "keeps its bytes in another file (external storage)")
        if plist.get_nfilters():
            raise self._refusal(path, "passes through a filter")
        if plist.get_layout() != h5py.h5d.CONTIGUOUS:
            raise self._refusal(path, f"is stored {_LAYOUTS.get(plist.get_layout(), 'in an unknown way')}")

    def _keep_manifest(
        self,
        dataset: h5py.h5d.DatasetID,
        dtype: np.dtype[np.generic],
        shape: tuple[int, ...],
        attributes: Mapping[str, Array],
    ) -> None:
        if dtype.kind != "S" or shape or attributes:
            raise self._refusal(layout.MANIFEST, "is not one text without attributes")
        array = np.empty((), dtype=dtype)
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, array, mtype=dataset.get_type())
        self.found.manifest = array.tobytes().rstrip(b"\0").decode()

    def _record(
        self, path: str, dtype: np.dtype[np.generic], shape: tuple[int, ...], attributes: Mapping[str, Array]
    ) -> Record:
        crc, name = attributes.get(layout.CRC32), attributes.get(layout.TORCH_DTYPE)
        if crc is None or crc.shape or crc.dtype != np.dtype("<u4"):
            raise self._refusal(path, f"lacks the attribute {layout.CRC32}")
        if name is None or name.shape or name.dtype.kind != "S":
            raise self._refusal(path, f"lacks the attribute {layout.TORCH_DTYPE}")
        word = name.tobytes().rstrip(b"\0").decode()
        if layout.STORAGE.get(word) != dtype:
            raise self._refusal(path, f"has the dtype {word!r}, stored as {dtype.str}: no such pair is known")
        return Record(path, shape, word, int(crc[()]), attributes)

    def _attributes(self, target: h5py.h5g.GroupID | h5py.h5d.DatasetID, path: str) -> dict[str, Array]:
        where, found = f"{self.name}: {path}", {}
        with refusing(where):
            for key in h5py.AttributeManager(_Holder(target)):
                layout.check_name(key, f"of {where}")
                found[key] = read_attribute(target, key, where, self.left)
                self.left -= found[key].nbytes
        return found

    def _once(self, target: h5py.h5g.GroupID | h5py.h5d.DatasetID, path: str) -> None:
        address = h5py.h5o.get_info(target).addr
        if address in self.seen:
            raise self._refusal(path, "is a second name of another object")
        self.seen.add(address)

    def _refusal(self, path: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {path} {reason}: not what hpctrain writes, refused")


@dataclass(frozen=True)
class _Holder:
    """Give ``AttributeManager`` the one thing it asks of its parent."""

    id: h5py.h5g.GroupID | h5py.h5d.DatasetID


@contextmanager
def refusing(what: object) -> Iterator[None]:
    """Turn whatever HDF5 and decoding raise over a damaged file into one kind of error that names the thing."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, OverflowError) as error:
        reason = " ".join(str(error.args[0] if error.args else "").split()) or type(error).__name__
        raise CheckpointError(f"{what} is damaged or torn: {reason}") from error


def _element_type(kind: h5py.h5t.TypeID, what: str) -> np.dtype[np.generic]:
    """Return the NumPy type of an HDF5 type that a checkpoint may hold: exact, so that nothing is converted."""
    if not kind.committed():
        if isinstance(kind, h5py.h5t.TypeStringID) and not kind.is_variable_str():
            return np.dtype(f"S{kind.get_size()}")
        for name, known in _TYPES.items():
            if kind.equal(known):
                return np.dtype(name)
    raise CheckpointError(f"{what} has a type that no checkpoint holds, refused")


def _extent(space: h5py.h5s.SpaceID, what: str) -> tuple[int, ...]:
    if space.get_simple_extent_type() not in (h5py.h5s.SCALAR, h5py.h5s.SIMPLE):
        raise CheckpointError(f"{what} has no extent, refused")
    return tuple(space.shape)
