"""Canonical list of every object and attribute of a file; its digest detects missing or altered ones.

HDF5 checksums its own structure, not its meaning: a file from which a dataset was removed, or in
which a dataset was never written, opens without an error. The writer stores the manifest; the
reader lists the file again and compares. One line per object or attribute, fields separated by
tabs, lines sorted by their bytes:

    group       PATH
    dataset     PATH  TYPE  SHAPE
    attribute   PATH  NAME  TYPE  SHAPE  CRC32
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping

from hpctrain.checkpoint.file.layout import DIGEST, Array, Record

Attributes = Mapping[str, Array]


def manifest(groups: Mapping[str, Attributes], records: Iterable[Record]) -> str:
    """Return the manifest of a file's groups (path to attributes) and datasets, without the manifest's digest."""
    lines: list[str] = []
    for path, attributes in groups.items():
        lines.append(f"group\t{path}")
        lines += _attribute_lines(path, attributes)
    for record in records:
        lines.append(f"dataset\t{record.path}\t{record.storage.str}\t{_shape(record.shape)}")
        lines += _attribute_lines(record.path, record.attributes)
    return "".join(line + "\n" for line in sorted(lines))


def digest(text: str) -> str:
    """Return the SHA-256 of a manifest in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def differences(promised: str, found: str) -> list[str]:
    """Return which objects are missing from a file, were added or are altered, one entry per object."""
    before, after = promised.splitlines(), found.splitlines()
    missing = _things(set(before) - set(after))
    extra = _things(set(after) - set(before))
    said = [f"{thing} is altered" for thing in sorted(missing & extra)]
    said += [f"{thing} is missing" for thing in sorted(missing - extra)]
    return said + [f"{thing} was added" for thing in sorted(extra - missing)]


def _attribute_lines(path: str, attributes: Attributes) -> list[str]:
    return [
        f"attribute\t{path}\t{name}\t{array.dtype.str}\t{_shape(array.shape)}\t{zlib.crc32(array.tobytes()):08x}"
        for name, array in attributes.items()
        if (path, name) != ("/", DIGEST)
    ]


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _things(lines: set[str]) -> set[str]:
    """Return the objects of the lines; attributes of an object that is listed itself are left out."""
    fields = [line.split("\t") for line in lines]
    objects = {path for kind, path, *_ in fields if kind != "attribute"}
    named = {f"{kind} {path}" for kind, path, *_ in fields if kind != "attribute"}
    return named | {f"attribute {rest[0]} of {path}" for _, path, *rest in fields if path not in objects}
