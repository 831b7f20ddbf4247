"""Search paths for libraries that are written into programs and libraries (ELF: DT_RPATH and DT_RUNPATH).

A Python that was built for a folder names that folder's ``lib`` in its program, and would load the library from there
although it was copied. The path is replaced in place by one relative to the program (``$ORIGIN``), if that is not
longer. Only 64-bit little-endian files are known, which those of today's clusters are.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

_MAGIC = b"\x7fELF\x02\x01"
_HEADER, _SEGMENT, _ENTRY = struct.Struct("<32xQ14xHH"), struct.Struct("<II6Q"), struct.Struct("<qQ")
_LOAD, _DYNAMIC = 1, 2
_STRINGS, _RPATH, _RUNPATH = 5, 15, 29
_MOST = 4096  # bytes of a path, and entries of a table


@dataclass(frozen=True)
class SearchPath:
    """Search path in a file: its offset and its text."""

    offset: int
    text: bytes


def search_paths(content: bytes | memoryview) -> list[SearchPath]:
    """Return the search paths in a program or library; none for other files, and for damaged ones."""
    if bytes(content[:6]) != _MAGIC:
        return []
    try:
        return list(_found(content))
    except (struct.error, ValueError, OverflowError):
        return []


def _found(content: bytes | memoryview) -> Iterator[SearchPath]:
    begin, size, count = _HEADER.unpack_from(content)
    segments = [_SEGMENT.unpack_from(content, begin + number * size) for number in range(min(count, _MOST))]
    loads = [(at, address, length) for kind, _, at, address, _, length, *_ in segments if kind == _LOAD]
    for kind, _, at, _, _, length, *_ in segments:
        if kind != _DYNAMIC:
            continue
        entries = [_ENTRY.unpack_from(content, at + place) for place in range(0, min(length, _MOST * 16), 16)]
        table = next((value for tag, value in entries if tag == _STRINGS), None)
        if table is None:
            return
        inside = (at + table - address for at, address, length in loads if 0 <= table - address < length)
        strings = next(inside, None)
        if strings is None:
            return
        for tag, value in entries:
            if tag in (_RPATH, _RUNPATH):
                place = strings + value
                text = bytes(content[place : place + _MOST])
                yield SearchPath(place, text[: text.index(b"\0")])


def local_text(text: bytes, name: str, roots: Mapping[str, str]) -> bytes:
    """Return a search path in which folders of the environment are relative to the file ``name`` of the archive.

    ``roots`` are the folders of the archive and their paths when it was packed.
    """
    return b":".join(os.fsencode(_local(os.fsdecode(part), name, roots)) for part in text.split(b":"))


def _local(part: str, name: str, roots: Mapping[str, str]) -> str:
    for root, path in roots.items():
        if PurePosixPath(part).is_relative_to(path):
            there = f"{root}/{PurePosixPath(part).relative_to(path)}"
            return f"$ORIGIN/{os.path.relpath(there, os.path.dirname(name))}"
    return part
