"""Search paths in programs: found where they are, made relative, damaged files have none."""

from __future__ import annotations

import struct

import pytest

from hpctrain.stage.rpath import local_text, search_paths

ADDRESS = 0x400000


def program(path: bytes, tag: int) -> tuple[bytes, int]:
    """Return a program of three parts after the headers, strings and the dynamic section, and the path's offset."""
    headers = 64 + 2 * 56
    strings = b"\0libm.so\0" + path + b"\0"
    dynamic = struct.pack("<qQqQqQ", 5, ADDRESS + headers, tag, strings.index(path), 0, 0)
    size = headers + len(strings) + len(dynamic)
    load = struct.pack("<II6Q", 1, 5, 0, ADDRESS, ADDRESS, size, size, 4096)
    table = struct.pack("<II6Q", 2, 6, headers + len(strings), 0, 0, len(dynamic), len(dynamic), 8)
    header = b"\x7fELF\x02\x01\x01" + bytes(25) + struct.pack("<QQIHHHHHH", 64, 0, 0, 64, 56, 2, 0, 0, 0)
    return header + load + table + strings + dynamic, headers + strings.index(path)


@pytest.mark.parametrize("tag", [15, 29])
def test_the_path_is_found_at_its_offset(tag: int) -> None:
    content, offset = program(b"/opt/python/lib:$ORIGIN", tag)
    (found,) = search_paths(content)
    assert (found.offset, found.text) == (offset, b"/opt/python/lib:$ORIGIN")
    assert search_paths(memoryview(content)) == [found]


def test_damaged_and_other_files_have_none() -> None:
    content, _ = program(b"/opt/python/lib", 29)
    assert all(search_paths(content[:length]) == [] for length in range(len(content) - 32))
    assert search_paths(b"#!/bin/sh\n") == search_paths(b"") == []
    for place in range(0, 176):
        search_paths(content[:place] + b"\xff" + content[place + 1 :])  # raises nothing


def test_folders_of_the_environment_become_relative() -> None:
    roots = {"env": "/home/me/venv", "base": "/opt/python"}
    assert local_text(b"/opt/python/lib", "base/bin/python3", roots) == b"$ORIGIN/../lib"
    assert local_text(b"/home/me/venv/lib", "env/lib/python3/x/y.so", roots) == b"$ORIGIN/../.."
    assert local_text(b"/usr/lib:/opt/python/lib", "env/bin/x", roots) == b"/usr/lib:$ORIGIN/../../base/lib"
    assert local_text(b"/opt/python3/lib:$ORIGIN", "env/bin/x", roots) == b"/opt/python3/lib:$ORIGIN"
