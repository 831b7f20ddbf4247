"""Datasets in MDS shards (MosaicML Streaming): samples by their number, from ``index.json`` and ``shard.*.mds``.

A shard begins with the number of samples and the offsets of all samples (uint32, little-endian, one
offset more than samples). A sample begins with the sizes of those columns that have no fixed size
(uint32); then the columns follow. The format is that of version 2 of ``index.json``.
"""

from __future__ import annotations

import decimal
import functools
import hashlib
import importlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.comm.agreement import agreed
from hpctrain.data.shards.decode import as_tensors, attempt, image_pixels, stored_pixels
from hpctrain.data.shards.files import Descriptor, Numbers, Path, ShardFiles, sample_numbers
from hpctrain.errors import DataError, UsageError
from hpctrain.util.reading import MIB, parse_json, read_json, reason
from hpctrain.util.text import printable, short_repr

Reader = Callable[[bytes], Any]

_LARGEST_INDEX = 1024 * MIB
_SCALARS = "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64".split()
# The codes of the element types in an array without a fixed one.
_CODES = dict(zip((8, 16, 32, 64, 9, 17, 33, 65, 18, 34, 66), _SCALARS))
_UNPACKERS = {"zstd": "zstd -d", "gz": "gunzip", "bz2": "bunzip2", "br": "brotli -d"}


class MdsDataset:
    """Map-style dataset of the samples in folders of MDS shards, which ``MDSWriter`` of MosaicML Streaming writes.

    A sample is a dict of column name and value: numbers and texts of Python, arrays and images as
    Tensors, images as ``hpctrain.data.shards.decode`` returns them. Samples are numbered in the order of
    the folders and their shards.
    """

    varies = True  # samples may have different sizes: job.loader explains why they cannot be stacked

    def __init__(
        self,
        folders: Path | Iterable[Path],
        *,
        fields: str | Sequence[str] | None = None,
        verify: bool = False,
        comm: Any = None,
    ) -> None:
        """Read the indexes and check the sizes of all shards. Collective if a communicator is given.

        ``fields`` are the columns that a sample contains, None for all. ``verify`` reads all shards
        and compares their hashes; the ranks of a communicator divide them. Raises ``DataError`` if a
        shard is missing, compressed or not as the index says, or if a column cannot be decoded.
        """
        named = [folders] if isinstance(folders, (str, os.PathLike)) else folders
        self.folders = [os.fspath(folder) for folder in named]
        wanted = [fields] if isinstance(fields, str) else None if fields is None else list(fields)
        shards = agreed(comm, lambda: [shard for folder in self.folders for shard in _shards(folder, wanted)])
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        mine = agreed(comm, lambda: [_check(shard, verify) for shard in shards[rank::size]], alike=False)
        if comm is not None:
            everyone = comm.all_gather_object(mine)
            mine = [everyone[number % size][number // size] for number in range(len(shards))]
        self.files = [shard.path for shard in shards]
        self._files = ShardFiles(self.files, [shard.nbytes for shard in shards], mine)
        self._layouts = [shard.layout for shard in shards]
        self._ends = np.cumsum([shard.samples for shard in shards], dtype=np.int64)
        self._offsets: dict[int, Numbers] = {}  # of the samples of each shard that has been read
        if not len(self):
            raise DataError(f"{', '.join(map(printable, self.folders))} has no samples")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample. Raises ``DataError`` if there is none of this number, or if its shard is damaged."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples in the order of ``indices``; reads are sorted by shard and offset."""
        numbers = sample_numbers(indices, len(self), printable(self.folders[0]))
        files = np.searchsorted(self._ends, numbers, side="right")
        begins, ends = np.empty_like(numbers), np.empty_like(numbers)
        for file in np.unique(files).tolist():
            rows = np.flatnonzero(files == file)
            offsets = self._offsets_of(file)
            within = numbers[rows] - self._first(file)
            begins[rows], ends[rows] = offsets[within], offsets[within + 1]
        found = self._files.read(files, begins, ends - begins)
        return [self._sample(*each) for each in zip(found, files.tolist(), numbers.tolist())]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def columns(self) -> dict[str, str]:
        """Return the encoding of each column in the first shard."""
        return {name: encoding for name, encoding, _, _ in self._layouts[0].columns}

    def _sample(self, data: bytes, file: int, number: int) -> dict[str, Any]:
        where = f"{printable(self.files[file])}: sample {number - self._first(file)}"
        found = {}
        for name, encoding, reader, value in self._layouts[file].split(data, where):
            found[name] = attempt(lambda: reader(value), f"the column {printable(name)} ({encoding})", where)
        return found

    def _first(self, file: int) -> int:
        return int(self._ends[file - 1]) if file else 0

    def _offsets_of(self, file: int) -> Numbers:
        """Return the offsets of a shard's samples and its end, which are read at first use."""
        offsets = self._offsets.get(file)
        if offsets is None:
            samples = int(self._ends[file]) - self._first(file)
            size = 4 * (samples + 2)
            head = self._files.read(np.asarray([file]), np.zeros(1, np.int64), np.asarray([size]))[0]
            values = np.frombuffer(head, "<u4").astype(np.int64)
            offsets = values[1:]
            if values[0] != samples or offsets[0] < size or offsets[-1] != self._files.size_of(file):
                raise DataError(
                    f"{printable(self.files[file])} is damaged: it begins with {values[0]} samples at offsets "
                    f"{offsets[0]} to {offsets[-1]}, expected {samples} from {size} to {self._files.size_of(file)}"
                )
            if (np.diff(offsets) < 0).any():
                raise DataError(f"{printable(self.files[file])} is damaged: the offsets of its samples descend")
            self._offsets[file] = offsets
        return offsets


# Index ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MdsLayout:
    """Columns of a shard in their order: name, encoding, fixed size (0 if there is none), whether it is wanted."""

    columns: tuple[tuple[str, str, int, bool], ...]

    def split(self, data: bytes, where: str) -> Iterator[tuple[str, str, Reader, bytes]]:
        """Yield name, encoding, reader and bytes of the wanted columns. Raises ``DataError`` if sizes do not add up."""
        free = sum(not size for _, _, size, _ in self.columns)
        at = 4 * free
        sizes = iter(struct.unpack_from(f"<{free}I", data) if len(data) >= at else ())
        lengths = [size or next(sizes, 0) for _, _, size, _ in self.columns]
        if at + sum(lengths) != len(data):
            raise DataError(f"{where} is damaged: its columns have {at + sum(lengths)} bytes, it has {len(data)}")
        for (name, encoding, _, wanted), length in zip(self.columns, lengths):
            if wanted:
                yield name, encoding, reader_of(encoding), data[at : at + length]
            at += length


@dataclass(frozen=True)
class MdsShard:
    """Entry of a shard in ``index.json``."""

    path: str
    nbytes: int
    samples: int
    layout: MdsLayout
    hashes: Mapping[str, str]
    packed: str  # path of the compressed file; empty if there is none
    compression: str


def _shards(folder: str, fields: Sequence[str] | None) -> list[MdsShard]:
    """Return the shards of a folder. Raises ``DataError`` if its index is missing, damaged or of another format."""
    path = os.path.join(folder, "index.json")
    where = printable(path)
    try:
        index = read_json(path, _LARGEST_INDEX)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {where}: {reason(error)}; a folder of MDS shards has an index.json") from error
    try:
        if index["version"] != 2:
            raise DataError(f"{where} has version {short_repr(index['version'])}; allowed is 2")
        return [_shard(folder, entry, fields, where) for entry in index["shards"]]
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        text = f"{where} is damaged: {type(error).__name__} {short_repr(str(error))}; write it again with MDSWriter"
        raise DataError(text) from error


def _shard(folder: str, entry: Any, fields: Sequence[str] | None, where: str) -> MdsShard:
    if entry["format"] != "mds" or entry["version"] != 2:
        kind = f"{entry['format']} of version {entry['version']}"
        raise DataError(f"{where} has shards of format {short_repr(kind)}; allowed is mds of version 2")
    raw, packed = entry["raw_data"], entry.get("zip_data") or {}
    names, encodings, sizes = entry["column_names"], entry["column_encodings"], entry["column_sizes"]
    if not len(names) == len(encodings) == len(sizes) or len(set(names)) < len(names):
        raise DataError(f"{where} is damaged: a shard has {len(names)} columns, {len(encodings)} encodings")
    for name in fields or ():
        if name not in names:
            raise DataError(f"{where} has no column {short_repr(name)}; it has {printable(', '.join(names))}")
    if fields is not None and not fields:
        raise DataError("fields is empty; allowed are one or several columns, or None for all")
    wanted = [fields is None or name in fields for name in names]
    for name, encoding, chosen in zip(names, encodings, wanted):
        if chosen:
            _check_encoding(encoding, f"{where}: the column {printable(name)}")
    counts = [int(size or 0) for size in sizes]
    samples, nbytes = int(entry["samples"]), int(raw["bytes"])
    if min([samples, nbytes, *counts]) < 0:
        raise DataError(f"{where} is damaged: it has negative sizes")
    return MdsShard(
        path=_inside(folder, raw["basename"], where),
        nbytes=nbytes,
        samples=samples,
        layout=MdsLayout(tuple(zip(names, encodings, counts, wanted))),
        hashes=dict(raw.get("hashes") or {}),
        packed=_inside(folder, packed["basename"], where) if packed else "",
        compression=str(entry.get("compression") or "").partition(":")[0],
    )


def _inside(folder: str, name: str, where: str) -> str:
    if os.path.isabs(name) or ".." in name.split("/"):
        raise DataError(f"{where} names {short_repr(name)}; allowed are files in its folder")
    return os.path.join(folder, name)


def _check(shard: MdsShard, verify: bool) -> int:
    """Return the time of change of a shard, 0 if it is a staged copy. Raises ``DataError`` if its contents differ."""
    if not os.path.exists(shard.path):
        if shard.packed and os.path.exists(shard.packed):
            tool = _UNPACKERS.get(shard.compression, f"a program for {printable(shard.compression)}")
            raise DataError(
                f"{printable(shard.packed)} is compressed: samples of a compressed shard cannot be found by their "
                f"offset; decompress all shards, such as {tool} < {printable(shard.packed)} > {printable(shard.path)}"
            )
        raise DataError(f"the shard {printable(shard.path)} is missing, which index.json names; copy it again")
    file = Descriptor(shard.path)
    if file.size != shard.nbytes:
        raise DataError(f"{file.path} has {file.size} bytes, index.json says {shard.nbytes}; copy it again")
    if verify:
        _verify(shard, file)
    return 0 if file.is_copy else file.mtime_ns


def _verify(shard: MdsShard, file: Descriptor) -> None:
    digests = {name: _digest(name, file.path) for name in shard.hashes}
    if not digests:
        raise DataError(f"{file.path} has no hash in index.json; use verify=False, or MDSWriter(hashes=['sha1'])")
    for begin in range(0, file.size, 4 * MIB):
        block = file.read(begin, 4 * MIB)
        for digest in digests.values():
            digest.update(block)
    for name, digest in digests.items():
        if digest.hexdigest() != shard.hashes[name]:
            raise DataError(f"{file.path} is damaged: its {name} is not that of index.json; copy it again")


def _digest(name: str, where: str) -> Any:
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return hashlib.new(name)
    try:
        xxhash = importlib.import_module("xxhash")
    except ImportError as error:
        raise UsageError(f"{where} has a hash {short_repr(name)}, which needs xxhash: pip install xxhash") from error
    if name not in xxhash.algorithms_available:
        raise DataError(f"{where} has an unknown hash {short_repr(name)}; use verify=False")
    return getattr(xxhash, name)()


# Encodings ------------------------------------------------------------------------------------------------------------


@functools.cache
def reader_of(encoding: str) -> Reader:
    """Return the function that decodes a column. Raises ``KeyError`` or ``ValueError`` if there is none."""
    kind, _, details = encoding.partition(":")
    if kind == "ndarray":
        return _array_reader(details)
    return _READERS[encoding]


def _check_encoding(encoding: str, where: str) -> None:
    if encoding == "pkl":
        raise DataError(
            f"{where} has the encoding pkl, which is refused, because unpickling executes code of the file; leave it "
            "out of fields, or write it as json or ndarray"
        )
    try:
        reader_of(encoding)
    except (KeyError, ValueError) as error:
        known = ", ".join(sorted({*_READERS, "ndarray"}))
        raise DataError(f"{where} has the unknown encoding {short_repr(encoding)}; allowed are {known}") from error


def _array_reader(details: str) -> Reader:
    """Return the reader of ``ndarray``, ``ndarray:DTYPE`` and ``ndarray:DTYPE:N,N``."""
    name, _, shape_text = details.partition(":")
    if name and name not in _SCALARS or shape_text and not name:
        raise ValueError(details)
    fixed = [int(size) for size in shape_text.split(",")] if shape_text else None

    def read(data: bytes) -> Any:
        at, element, shape = 0, name, fixed
        if not element:
            element, at = _CODES[data[0]], 1
        if shape is None:
            dims, width = data[at] >> 2, 1 << (data[at] & 3)
            at += 1 + dims * width
            shape = np.frombuffer(data[at - dims * width : at], f"<u{width}", dims).tolist()
        values = np.frombuffer(data, np.dtype(element).newbyteorder("<"), offset=at)
        return as_tensors(values.reshape(shape))

    return read


def _scalar_reader(code: str) -> Reader:
    return lambda data: struct.unpack(f"<{code}", data)[0]


def _image(data: bytes) -> Any:
    return as_tensors(image_pixels(data))


def _stored_image(data: bytes) -> Any:
    width, height, length = struct.unpack_from("<3I", data)
    mode = data[12 : 12 + length].decode("utf-8")
    return as_tensors(stored_pixels(mode, width, height, data[12 + length :]))


def _list_reader(read: Reader, begin: int) -> Reader:
    """Return the reader of a list: the number of elements at ``begin``, their sizes, and the elements."""

    def read_all(data: bytes) -> list[Any]:
        (count,) = struct.unpack_from("<I", data, begin)
        at = begin + 4 + 4 * count
        if at > len(data):
            raise DataError(f"{count} elements do not fit into {len(data)} bytes")
        found = []
        for size in struct.unpack_from(f"<{count}I", data, begin + 4):
            found.append(read(data[at : at + size]))
            at += size
        if at != len(data):
            raise DataError(f"its elements have {at} bytes, it has {len(data)}")
        return found

    return read_all


_READERS: dict[str, Reader] = {
    "bytes": lambda data: data,
    "str": lambda data: data.decode("utf-8"),
    "json": lambda data: parse_json(data.decode("utf-8")),
    "int": _scalar_reader("q"),
    **{name: _scalar_reader(code) for name, code in zip(_SCALARS, "BHIQbhiqefd")},
    "str_int": lambda data: int(data.decode("ascii")),
    "str_float": lambda data: float(data.decode("ascii")),
    "str_decimal": lambda data: decimal.Decimal(data.decode("ascii")),
    "jpeg": _image,
    "png": _image,
    "pil": _stored_image,
    **dict.fromkeys(("jpegarray", "jpeg_array"), _list_reader(_image, 0)),
    **dict.fromkeys(("list[jpeg]", "list[png]"), _list_reader(_image, 4)),
    "list[pil]": _list_reader(_stored_image, 4),
}
