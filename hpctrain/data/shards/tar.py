"""Datasets in tar files (WebDataset): an index of the members from their headers, and samples by their number.

The index is made by one pass over the headers; contents are skipped. It consists of a few arrays:
about 20 bytes per member and the text of the keys. Formats: ustar, GNU (long names, sizes in base
256) and pax, as POSIX.1-2017 and the manual of GNU tar describe them.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.comm.agreement import agreed, on_first_rank
from hpctrain.data.shards.decode import decode_tensors
from hpctrain.data.shards.files import Descriptor, Numbers, Path, ShardFiles, find_files, sample_numbers
from hpctrain.errors import DataError
from hpctrain.util.text import counted, printable, short_repr

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_WINDOW = 128 * 1024  # bytes that are read at once while members are small
_LONGEST = 1 << 20  # bytes of a long name or of pax records
_META = re.compile(r"__[^/]*__($|/)")  # members that WebDataset skips
_PACKED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"\x04\x22\x4d\x18": "unlz4",
}
_FILES = {b"0", b"\0", b"7"}
_FOLDER = b"5"
_EXTENDED = {b"L", b"K", b"x", b"X", b"g"}
_OTHERS = {b"1": "a hard link", b"2": "a symbolic link", b"S": "a sparse file"}


class TarDataset:
    """Map-style dataset of the samples in tar files, which WebDataset and ``tar --sort=name`` write.

    Consecutive members whose path is the same up to the first dot of the base name are a sample: a
    dict of ``__key__`` and one value per extension in lower case, decoded by
    ``hpctrain.data.shards.decode``. Hidden files, members without an extension, and those that begin with
    ``__name__`` are skipped. Samples are numbered in the order of the files.
    """

    varies = True  # samples may have different sizes: job.loader explains why they cannot be stacked

    def __init__(
        self,
        files: Path | Iterable[Path],
        *,
        fields: str | Sequence[str] | None = None,
        decode: bool = True,
        comm: Any = None,
    ) -> None:
        """Make the index. Collective if a communicator is given: its ranks then divide the files.

        ``files`` are paths, globs and brace patterns. ``fields`` are the extensions that a sample
        contains, None for all of its own; others are never read. Values are bytes with
        ``decode=False``. Raises ``DataError`` if a file is missing, damaged, compressed, or if a
        sample lacks a field.
        """
        paths = find_files(files) if comm is None else on_first_rank(comm, lambda: find_files(files))
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        mine = agreed(comm, lambda: [scan(path) for path in paths[rank::size]], alike=False)
        if comm is not None:
            everyone = comm.all_gather_object(mine)
            mine = [everyone[number % size][number // size] for number in range(len(paths))]
        self.files, self._decode = paths, decode
        self._shards = ShardFiles(paths, [each.size for each in mine], [each.mtime_ns for each in mine])
        self._join(mine)
        if not len(self):
            raise DataError(f"{self._name()} has no samples; members have names such as 0001.jpg and 0001.cls")
        if fields is not None:
            self._select([fields] if isinstance(fields, str) else list(fields))

    def __len__(self) -> int:
        return len(self._key_ends) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample. Raises ``DataError`` if there is none of this number, or if its file is damaged."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples in the order of ``indices``; reads are sorted by file and offset."""
        numbers = sample_numbers(indices, len(self), self._name())
        counts = self._ends[numbers + 1] - self._ends[numbers]
        last = np.cumsum(counts)
        members = np.arange(counts.sum()) + np.repeat(self._ends[numbers] - (last - counts), counts)
        files = np.searchsorted(self._file_ends, numbers, side="right")
        offsets, sizes = self._offsets[members], self._sizes[members]
        contents = self._shards.read(np.repeat(files, counts), offsets, sizes)
        names = [self.extensions[each] for each in self._extension_of[members].tolist()]
        found = []
        start = 0
        for number, stop in zip(numbers.tolist(), last.tolist()):
            key = self.keys(number)
            sample: dict[str, Any] = {"__key__": key}
            for at in range(start, stop):
                name = names[at]
                if self._decode:
                    where = f"{self.files[self._file_of(number)]}: member {key}.{name} at offset {offsets[at]}"
                    sample[name] = decode_tensors(name, contents[at], printable(where))
                else:
                    sample[name] = contents[at]
            found.append(sample)
            start = stop
        return found

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def keys(self, index: int) -> str:
        """Return the key of a sample: the path of its members up to the first dot of the base name."""
        if not 0 <= index < len(self):
            sample_numbers([index], len(self), self._name())
        return self._keys[self._key_ends[index] : self._key_ends[index + 1]].decode("utf-8", "surrogateescape")

    def sizes(self, extension: str) -> Numbers:
        """Return the bytes of this extension in every sample, from the index; 0 for samples that lack it."""
        if extension not in self.extensions:
            raise DataError(self._unknown(extension))
        members = np.flatnonzero(self._extension_of == self.extensions.index(extension))
        found = np.zeros(len(self), np.int64)
        found[np.searchsorted(self._ends, members, side="right") - 1] = self._sizes[members]
        return found

    def _join(self, parts: Sequence[TarIndex]) -> None:
        """Concatenate the indexes of the files."""
        self.extensions = tuple(dict.fromkeys(name for part in parts for name in part.extensions))
        number_of = {name: number for number, name in enumerate(self.extensions)}
        if len(number_of) > 1 << 16:
            raise DataError(f"{self._name()} has {len(number_of)} extensions; a number must be before the first dot")
        tables = [np.asarray([number_of[name] for name in part.extensions], np.uint16) for part in parts]
        self._extension_of = np.concatenate([table[part.kinds] for table, part in zip(tables, parts)])
        self._offsets = np.concatenate([part.offsets for part in parts])
        self._sizes = np.concatenate([part.sizes for part in parts])
        self._ends = _joined_ends([part.ends for part in parts])  # sample i has the members ends[i] to ends[i + 1]
        self._key_ends = _joined_ends([part.key_ends for part in parts])
        self._keys = b"".join(part.keys for part in parts)
        self._file_ends = np.cumsum([len(part.ends) for part in parts])

    def _select(self, fields: Sequence[str]) -> None:
        """Keep the members of these extensions, in this order in every sample."""
        wanted = [name.lower().removeprefix(".") if isinstance(name, str) else name for name in fields]
        for name in wanted:
            if name not in self.extensions:
                raise DataError(self._unknown(name))
        if not wanted or len(set(wanted)) < len(wanted):
            raise DataError(f"fields = {short_repr(fields)}: allowed are one or several extensions, each once")
        table = np.full((len(self), len(wanted)), -1, np.int64)
        for column, name in enumerate(wanted):
            members = np.flatnonzero(self._extension_of == self.extensions.index(name))
            table[np.searchsorted(self._ends, members, side="right") - 1, column] = members
        lacking = np.argwhere(table < 0)
        if len(lacking):
            number, column = lacking[0].tolist()
            file = printable(self.files[self._file_of(number)])
            raise DataError(
                f"{file}: the sample {printable(self.keys(number))} has no .{wanted[column]}, as "
                f"{counted(len(np.unique(lacking[:, 0])), 'sample')} of {len(self)}; allowed as fields are extensions "
                "that every sample has; repair the file or leave it out"
            )
        chosen = table.reshape(-1)
        self._offsets, self._sizes = self._offsets[chosen], self._sizes[chosen]
        self._extension_of = np.tile(np.arange(len(wanted), dtype=np.uint16), len(self))
        self._ends = np.arange(len(self) + 1, dtype=np.int64) * len(wanted)
        self.extensions = tuple(wanted)

    def _file_of(self, number: int) -> int:
        return int(np.searchsorted(self._file_ends, number, side="right"))

    def _name(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return printable(self.files[0]) + more

    def _unknown(self, name: Any) -> str:
        some = ", ".join(self.extensions[:12])
        return f"{self._name()} has no member with extension {short_repr(name)}; it has {printable(some)}"


def _joined_ends(parts: Sequence[Numbers]) -> Numbers:
    """Return 0 and the ends of all parts, each of which counts from 0."""
    bases = np.cumsum([0, *(part[-1] if len(part) else 0 for part in parts[:-1])])
    return np.concatenate([np.zeros(1, np.int64), *(part + base for part, base in zip(parts, bases))])


# Index of one file ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TarIndex:
    """Members of a file and their samples: sample i has the members ``ends[i - 1]`` to ``ends[i]``."""

    size: int
    mtime_ns: int  # 0: unknown, because a staged copy was read
    offsets: Numbers
    sizes: Numbers
    kinds: np.ndarray[Any, np.dtype[np.uint16]]  # number in ``extensions``
    extensions: tuple[str, ...]
    ends: Numbers
    keys: bytes
    key_ends: Numbers


def scan(path: str) -> TarIndex:
    """Return the index of a tar file. Raises ``DataError`` if it is damaged, truncated, compressed or not a tar."""
    file, where = Descriptor(path), printable(path)
    offsets, sizes, ends, key_ends, kinds = array("q"), array("q"), array("q"), array("q"), array("H")
    keys, names = bytearray(), dict[str, int]()
    seen = dict[str, int]()  # last sample of each key
    key, own = "", set[int]()
    for name, offset, size in _members(file, where):
        stem, dot, extension = name.rpartition("/")[2].partition(".")
        if not stem or not dot or _META.match(name):
            continue
        found = name[: len(name) - len(extension) - 1]
        kind = names.setdefault(extension.lower(), len(names))
        if kind > 0xFFFF:
            raise DataError(f"{where} has more than 65,536 extensions; a number must be before the first dot")
        if found != key or not ends:
            before = seen.get(found)
            if before is not None and kind not in kinds[ends[before - 1] if before else 0 : ends[before]]:
                raise DataError(
                    f"{where}: {printable(name)} at offset {offset} is apart from other members of its sample; "
                    "members of a sample must be consecutive; write the file with tar --sort=name"
                )
            key, own, seen[found] = found, set(), len(ends)
            keys += found.encode("utf-8", "surrogateescape")
            key_ends.append(len(keys))
            ends.append(0)
        if kind in own:
            raise DataError(
                f"{where}: {printable(name)} at offset {offset} occurs twice in its sample; keep one of them"
            )
        own.add(kind)
        offsets.append(offset)
        sizes.append(size)
        kinds.append(kind)
        ends[-1] = len(offsets)
    return TarIndex(
        size=file.size,
        mtime_ns=0 if file.is_copy else file.mtime_ns,
        offsets=np.asarray(offsets, np.int64),
        sizes=np.asarray(sizes, np.int64),
        kinds=np.asarray(kinds, np.uint16),
        extensions=tuple(names),
        ends=np.asarray(ends, np.int64),
        keys=bytes(keys),
        key_ends=np.asarray(key_ends, np.int64),
    )


def _members(file: Descriptor, where: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of the regular files, in their order."""
    window, at, mean = _Window(file), 0, 0.0  # of the sizes of recent members
    records: dict[bytes, bytes] = {}  # of extended headers, for the next member
    while True:
        header = window.read(at, _BLOCK)
        if header == _ZEROS or len(header) < _BLOCK:
            return _check_end(file, at, where, bool(records))
        if not _is_header(header):
            raise DataError(f"{where} {_kind_of(header, at)}")
        kind, content = header[156:157], at + _BLOCK
        size = 0 if kind == _FOLDER else _number(records[b"size"] if b"size" in records else header[124:136])
        if size < 0 or content + size > file.size:
            raise DataError(
                f"{where} is truncated or damaged: the member at offset {content} has {size} bytes, the file "
                f"{file.size}; copy it again"
            )
        at = content + -(-size // _BLOCK) * _BLOCK
        mean += (size - mean) / 8
        window.length = _WINDOW if mean < _WINDOW / 8 else 8 * _BLOCK
        if kind in _FILES:
            yield _name(header, records).decode("utf-8", "surrogateescape"), content, size
            records = {}
        elif kind in _EXTENDED and size <= _LONGEST:
            records |= _records(kind, window.read(content, size), content, where)
        elif kind == _FOLDER:
            records = {}
        else:
            what = _OTHERS.get(kind, f"a member of type {kind!r}")
            name = printable(_name(header, records).decode("utf-8", "replace"))
            raise DataError(
                f"{where}: {name} at offset {content} is {what}; allowed are files and folders; write the tar with "
                "tar --dereference --hard-dereference"
            )


class _Window:
    """Bytes near an offset of a file: many small members are read at once, large contents are skipped."""

    def __init__(self, file: Descriptor) -> None:
        self.length = _WINDOW
        self._file, self._begin, self._bytes = file, 0, b""

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the file, fewer at its end."""
        low = offset - self._begin
        if low + size > len(self._bytes):
            self._bytes, self._begin, low = self._file.read(offset, max(size, self.length)), offset, 0
        return self._bytes[low : low + size]


def _is_header(header: bytes) -> bool:
    """Return whether the checksum is right: the sum of the bytes, with blanks for the checksum itself."""
    field = header[148:156]
    stored = _number(field)
    others = stored + sum(field) - 8 * ord(" ")
    if 0 <= stored and (others + 1 - zlib.adler32(header)) & 0xFFFF == 0:  # the low half is 1 + the sum, below 65521
        return True
    signed = sum(byte - 256 if byte > 127 else byte for byte in header)  # as some old programs count
    return others in (sum(header), signed)


def _number(field: bytes) -> int:
    """Return a number of a header: octal digits, or base 256 (GNU); -1 if it is neither."""
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        return -1


def _name(header: bytes, records: dict[bytes, bytes]) -> bytes:
    """Return the path of a member: that of an extended header, or name and prefix of the header."""
    if b"path" in records:
        return records[b"path"]
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and header[345]:
        return header[345:500].split(b"\0", 1)[0] + b"/" + name
    return name


def _records(kind: bytes, data: bytes, offset: int, where: str) -> dict[bytes, bytes]:
    """Return what an extended header says about the next member: ``path``, and ``size`` in octal digits."""
    if kind == b"L":
        return {b"path": data.split(b"\0", 1)[0]}
    if kind == b"K":
        return {}
    found, at = dict[bytes, bytes](), 0
    while at < len(data):
        digits = data[at : at + 20].split(b" ", 1)[0]
        end = at + int(digits) if digits.isdigit() else 0
        key, equals, value = data[at + len(digits) + 1 : end].partition(b"=")
        if not equals or value[-1:] != b"\n" or end > len(data):
            raise DataError(f"{where} is damaged: the pax header at offset {offset} has no valid record; copy it again")
        found[key] = value[:-1]
        at = end
    if any(key.startswith(b"GNU.sparse") for key in found):
        raise DataError(f"{where}: the member at offset {offset} is sparse; write the tar without --sparse")
    if b"size" in found:
        found[b"size"] = b"%o" % int(found[b"size"]) if found[b"size"].isdigit() else b"-1"
    if kind == b"g" and (b"path" in found or b"size" in found):
        raise DataError(f"{where}: the global pax header at offset {offset} names one path or size for all members")
    return {} if kind == b"g" else {key: found[key] for key in (b"path", b"size") if key in found}


def _kind_of(header: bytes, at: int) -> str:
    """Return what is wrong with a block that should be a header."""
    tool = next((tool for magic, tool in _PACKED.items() if header.startswith(magic)), "")
    if at == 0 and tool:
        return f"is compressed: members of a compressed tar cannot be found by their offset; decompress it with {tool}"
    if at == 0 and header[257:262] != b"ustar":
        return "is not a tar file; allowed are uncompressed tars (ustar, GNU, pax)"
    return f"is damaged: the header at offset {at} has a wrong checksum; copy it again"


def _check_end(file: Descriptor, at: int, where: str, open_record: bool) -> None:
    """Raise ``DataError`` unless zeros end the file: without them it is truncated, and tars may follow each other."""
    if file.size < at + _BLOCK or open_record:
        raise DataError(
            f"{where} is truncated: its members end at offset {min(at, file.size)} of {file.size} without the blocks "
            "of zeros that end a tar; copy it again"
        )
    for begin in range(at, file.size, _LONGEST):
        if file.read(begin, _LONGEST).strip(b"\0"):
            raise DataError(
                f"{where} has data after its end at offset {at}, as tars have that cat has joined; join them with "
                "tar --concatenate, or name them one by one"
            )
