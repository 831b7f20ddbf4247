"""Contents of a checkpoint file: names, element types, and the checksums that cover every bit of it.

Everything here is pure: tables and functions over text, bytes and NumPy types.
``docs/checkpoint-format.md`` describes the same in words.

An attribute is an int64, a float64, a uint32, a text of fixed length (UTF-8, padded with NUL) or a
list of such texts. Texts of variable length would be stored in a heap that HDF5 does not checksum.
Other values (booleans, ``None``, lists, tables, huge integers) are JSON under the name with the
suffix ``.json``.

A CRC-32 covers each extent of the tensors, the manifest all objects, the seal the rest. Intel's
library (``isal``) computes the same CRC-32 as zlib several times faster. A login node that only
reads files needs neither the library nor the combination, which only writers of partial data use.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.checkpoint.format.reader import Reader

try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

Array = npt.NDArray[np.generic]
Value = int | float | str | np.uint32 | tuple[str, ...]  # of an attribute
Groups = Mapping[str, Mapping[str, Value]]  # attributes of groups by path

FORMAT = "hpctrain-checkpoint"
VERSION = (1, 3)  # (major, minor): a reader refuses a newer major version and ignores additions of a newer minor one
COMMON = (1, 2)  # version of a file without newer features: keys of models or optimizers, tensors of states

MODEL, OPTIMIZER, WORKERS, TRAIN, RNG = "/model", "/optimizer", "/workers", "/train", "/rng"
STATES = "/states"
CONFIG, PROVENANCE, MANIFEST, EXTENTS, SEAL = "/config", "/provenance", "/manifest", "/extents", "/seal"
SEALED_SINCE, EXTENTS_SINCE = (1, 1), (1, 2)  # files of older versions have no seal or no table of extents
CRC32, TORCH_DTYPE, DIGEST = "crc32", "torch_dtype", "manifest_sha256"
JSON_SUFFIX = ".json"

PIECE = 16 << 20  # bytes per I/O: large enough for any filesystem, and a small, bounded buffer
EXTENT = 4 << 20  # bytes of a tensor with a CRC-32 of their own: to read a slice, at most this much is read around it
ALIGNMENT = 1 << 20  # bytes: tensors of at least this size start at multiples of it, unless the settings differ

# Storage type in HDF5 per torch type. HDF5 has no bfloat16: its 16 bits are stored as an unsigned integer.
STORAGE: dict[str, np.dtype[np.generic]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("|i1"),
    "uint8": np.dtype("|u1"),
    "bool": np.dtype("|u1"),
}

_LONGEST_NAME = 1024


@dataclass(frozen=True)
class Record:
    """A stored tensor; ``dtype`` is the torch name, ``crc32`` covers its bytes in C order, little endian.

    ``attributes`` are all attributes of the dataset, as the file stores them.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    crc32: int
    attributes: Mapping[str, Array] = field(default_factory=dict, compare=False)

    @property
    def storage(self) -> np.dtype[np.generic]:
        """Return the element type in the file."""
        return STORAGE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.storage.itemsize


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as text: ``2x3``, ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def storage_of(dtype: str, what: str) -> np.dtype[np.generic]:
    """Return the element type in the file for a torch name; raises ``CheckpointError`` with the allowed names."""
    if dtype not in STORAGE:
        raise CheckpointError(f"{what} has the dtype {dtype}: a checkpoint holds {', '.join(STORAGE)}")
    return STORAGE[dtype]


@lru_cache(maxsize=1 << 16)  # each save of a run asks for the same paths
def child(group: str, name: str) -> str:
    """Return the path of ``name`` in a group; dots stay, names that HDF5 would read as a path are refused."""
    check_name(name, f"in {group}")
    return f"{group.rstrip('/')}/{name}"


def check_name(name: str, where: str) -> None:
    """Raise ``CheckpointError`` unless the name is valid as one component of a path."""
    if name in ("", ".", ".."):
        reason = "be empty, '.' or '..'"
    elif "/" in name:
        reason = "contain '/'"
    elif not name.isprintable():  # also covers lone surrogates, which UTF-8 cannot encode
        reason = "contain control characters"
    elif len(name.encode()) > _LONGEST_NAME:
        reason = f"be longer than {_LONGEST_NAME} bytes"
    else:
        return
    shown = name if len(name) <= 80 else name[:80] + "..."
    raise CheckpointError(f"the name {shown!r} {where} cannot be stored: it must not {reason}")


def version_for(groups: Mapping[str, Mapping[str, object]], paths: Iterable[str]) -> tuple[int, int]:
    """Return the format version that a file needs, given its groups with attributes and its datasets."""
    keyed = any("keys" in groups.get(group, {}) for group in (MODEL, OPTIMIZER))
    return VERSION if keyed or any(path.startswith(f"{STATES}/") for path in paths) else COMMON


def format_version(text: str) -> tuple[int, int]:
    """Return ``"1.0"`` as two numbers; raises ``ValueError`` if the text is not two numbers."""
    major, minor = text.split(".")
    return int(major), int(minor)


# Keys of several models or optimizers in one file: one group each below ``/model`` or ``/optimizer`` ------------------
#
# A single model or optimizer has no key (``""``) and is stored in the common group itself.


KEYS = "keys"  # the attribute of /model and of /optimizer that lists the keys
FROZEN = "frozen"  # attribute of /model in a file without the frozen parameters: their fingerprint


def group_of(group: str, key: str) -> str:
    """Return the group of a model or optimizer: the common group if there is no key."""
    return child(group, key) if key else group


def keys_in(reader: Reader, group: str) -> list[str]:
    """Return the keys of the models or optimizers in a file: ``[""]`` for a single one, ``[]`` for none."""
    if group not in reader.groups:
        return []
    keys = reader.values(group).get(KEYS, ("",))
    return [keys] if isinstance(keys, str) else [str(key) for key in keys]


def key_groups(group: str, keys: Sequence[str]) -> dict[str, dict[str, Value]]:
    """Return the groups of several models or optimizers with their attributes; empty for a single one."""
    if not keys or list(keys) == [""]:
        return {}
    return {group: {KEYS: tuple(keys)}, **{child(group, key): {} for key in keys}}


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of consecutive byte ranges, from the CRC-32 and the length of each."""
    from isal.isal_zlib import crc32_combine

    whole = 0
    for crc, nbytes in parts:
        whole = crc32_combine(whole, crc, nbytes)
    return int(whole)


# Table of extents, which covers every byte of the tensors: offset, length and CRC-32 of each extent -------------------
#
# A tensor is divided into extents of 4 MiB from its start. With the CRC-32 of each, a reader can
# check a slice without reading all of the tensor. The CRC-32 of the tensor follows from them. Writers
# report what they wrote, in ranges of any size that do not cross the boundary between extents.


COLUMNS = ("tensor", "offset", "length", "crc32")

Table = npt.NDArray[np.int64]  # rows of the columns; tensors are numbered from 0 in the order of their offsets
Written = npt.NDArray[np.int64]  # rows of offset in the file, length, CRC-32


@dataclass(frozen=True)
class Extent:
    """A byte range of a tensor: its offset in the file, its length and its CRC-32."""

    offset: int
    nbytes: int
    crc32: int


def rows_of(nbytes: int) -> int:
    """Return the number of extents of a tensor."""
    return -(-nbytes // EXTENT)


def table_of(tensors: Sequence[tuple[int, int]], written: Written) -> Table:
    """Return the table of ``tensors`` (offset and bytes of each), from the written ranges.

    Raises ``CheckpointError`` unless the ranges cover each byte of the tensors exactly once.
    """
    rows_written = written[np.argsort(written[:, 0], kind="stable")].tolist() if len(written) else []
    rows: list[tuple[int, int, int, int]] = []
    at = 0
    for number, (offset, nbytes) in enumerate(sorted(tensors)):
        for start in range(offset, offset + nbytes, EXTENT):
            end, parts, reached = min(start + EXTENT, offset + nbytes), [], start
            while at < len(rows_written) and reached < end and rows_written[at][0] == reached:
                parts.append((rows_written[at][2], rows_written[at][1]))
                reached += rows_written[at][1]
                at += 1
            if reached != end:
                raise CheckpointError(f"the bytes from {reached} to {end} of the file were not written, or not once")
            rows.append((number, start, end - start, combined(parts)))
    if at != len(rows_written):
        raise CheckpointError(f"bytes at {rows_written[at][0]} of the file were written that belong to no tensor")
    return np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS))


def by_tensor(table: Table, count: int) -> list[list[Extent]]:
    """Return the extents of each of ``count`` tensors, in the order of their offsets."""
    found: list[list[Extent]] = [[] for _ in range(count)]
    for number, offset, nbytes, crc in table.tolist():
        if not 0 <= number < count:
            raise CheckpointError(f"{EXTENTS} refers to a tensor {number}: there are {count}")
        found[number].append(Extent(offset, nbytes, crc))
    return found


def check_extents(extents: Sequence[Extent], offset: int, nbytes: int, what: str) -> None:
    """Raise ``CheckpointError`` unless the extents cover each byte of a tensor once and in order."""
    bounds = [*(extent.offset for extent in extents), offset + nbytes]
    lengths = [extent.nbytes for extent in extents]
    if bounds != list(accumulate(lengths, initial=offset)) or any(length <= 0 for length in lengths):
        raise CheckpointError(f"{EXTENTS} does not cover {what}")


# Canonical list of every object and attribute of a file; its digest detects missing or altered ones -------------------
#
# HDF5 checksums its own structure, not its meaning: a file from which a dataset was removed, or in
# which a dataset was never written, opens without an error. The writer stores the manifest; the
# reader lists the file again and compares. One line per object or attribute, fields separated by
# tabs, lines sorted by their bytes:
#
#     group       PATH
#     dataset     PATH  TYPE  SHAPE
#     attribute   PATH  NAME  TYPE  SHAPE  CRC32


Attributes = Mapping[str, Array]


def manifest(groups: Mapping[str, Attributes], records: Iterable[Record]) -> str:
    """Return the manifest of a file's groups (path to attributes) and datasets, without the manifest's digest."""
    lines: list[str] = []
    for path, attributes in groups.items():
        lines.append(f"group\t{path}")
        lines += _attribute_lines(path, attributes)
    for record in records:
        lines.append(f"dataset\t{record.path}\t{record.storage.str}\t{shape_text(record.shape)}")
        lines += _attribute_lines(record.path, record.attributes)
    return "".join(line + "\n" for line in sorted(lines))


def digest(text: str) -> str:
    """Return the SHA-256 of a manifest in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def differences(promised: str, found: str) -> list[str]:
    """Return which objects are missing from a file, were added or are altered, one entry per object."""
    before, after = promised.splitlines(), found.splitlines()
    missing = _objects(set(before) - set(after))
    extra = _objects(set(after) - set(before))
    lines = [f"{item} is altered" for item in sorted(missing & extra)]
    lines += [f"{item} is missing" for item in sorted(missing - extra)]
    return lines + [f"{item} was added" for item in sorted(extra - missing)]


def _attribute_lines(path: str, attributes: Attributes) -> list[str]:
    return [
        f"attribute\t{path}\t{name}\t{array.dtype.str}\t{shape_text(array.shape)}\t{crc32(array.tobytes()):08x}"
        for name, array in attributes.items()
        if (path, name) != ("/", DIGEST)
    ]


def _objects(lines: set[str]) -> set[str]:
    """Return the objects of the lines; attributes of an object that is listed itself are left out."""
    fields = [line.split("\t") for line in lines]
    objects = {path for kind, path, *_ in fields if kind != "attribute"}
    named = {f"{kind} {path}" for kind, path, *_ in fields if kind != "attribute"}
    return named | {f"attribute {rest[0]} of {path}" for _, path, *rest in fields if path not in objects}


# Seal: digest of the bytes that have no other checksum: HDF5's structure, the table of extents, unused space ----------
#
# Note: the seal. Tensors have a CRC-32 and the manifest has a digest. HDF5 checksums most of its
# structure, but neither its unused space nor what a newer library might read there. The seal is the
# SHA-256 of all of that, so that a flip of any bit in the file is detected. The seal is a dataset
# itself: its offset is known before its content, and it does not cover itself. Ranges of zeros, which
# alignment makes long, only cost the time to read them.


SEAL_LENGTH = 64  # hexadecimal digits
_PIECE = 1 << 20  # bytes per piece; part of the format
_MOST = 1 << 17  # pieces
_ZEROS = bytes(4096)
_AT = struct.Struct("<Q")

Range = tuple[int, int]  # offset and number of bytes


def seal(
    size: int,
    checked: Iterable[Range],
    read: Callable[[int, int], bytes],
    next_data: Callable[[int], int] = lambda at: at,
) -> str:
    """Return the seal of a file of ``size`` bytes, without the ranges ``checked``, which have other checksums.

    ``read`` returns the bytes at an offset; it may omit zeros at their end. Each range between
    those in ``checked`` is divided into pieces of 1 MiB from its start. A piece contributes its
    offset and its bytes up to the last one that is not zero. ``next_data`` returns an offset up to
    which the file has only zeros, so that holes cost nothing.

    Raises ``CheckpointError`` if there is more to read than the structure of any checkpoint has.
    """
    digest, read_so_far = hashlib.sha256(_AT.pack(size)), 0
    for start, count in outside(size, checked):
        at, end = start, start + count
        while (at := at + max(next_data(at) - at, 0) // _PIECE * _PIECE) < end:
            rest = _stripped(read(at, min(_PIECE, end - at)))
            if rest:
                digest.update(_AT.pack(at) + _AT.pack(len(rest)) + rest)
            at += _PIECE
            read_so_far += 1
            if read_so_far > _MOST:
                raise CheckpointError(f"more than {_MOST * _PIECE} bytes belong to no tensor: not what hpctrain writes")
    return digest.hexdigest()


def _stripped(data: bytes) -> bytes:
    """Return the bytes without the zeros at their end; page by page, because ``rstrip`` tests each byte."""
    end = len(data)
    while end >= len(_ZEROS) and data.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    return data[:end].rstrip(b"\0")


def overlap(ranges: Iterable[Range]) -> Range | None:
    """Return a range that overlaps with a preceding one; ``None`` if no ranges overlap."""
    end = 0
    for start, count in sorted(ranges):
        if start < end:
            return start, count
        end = start + count
    return None


def outside(size: int, checked: Iterable[Range]) -> Iterator[Range]:
    """Yield the ranges between those in ``checked``, in order. The ranges in ``checked`` must not overlap."""
    done = 0
    for start, count in sorted(checked):
        if start > done:
            yield done, start - done
        done = start + count
    if size > done:
        yield done, size - done
