"""Checksums of HDF5's structure, so that a crafted file can carry valid ones."""

from __future__ import annotations

import struct


def lookup3(data: bytes) -> int:
    """Return the lookup3 hash (Bob Jenkins) of bytes, HDF5's checksum of its structure (H5_checksum_lookup3)."""
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF

    def rot(x: int, k: int) -> int:
        return ((x << k) | (x >> (32 - k))) & 0xFFFFFFFF

    at = 0
    while len(data) - at > 12:
        x, y, z = struct.unpack_from("<3I", data, at)
        a, b, c = (a + x) & 0xFFFFFFFF, (b + y) & 0xFFFFFFFF, (c + z) & 0xFFFFFFFF
        for k1, k2, k3 in ((4, 6, 8), (16, 19, 4)):
            a = ((a - c) & 0xFFFFFFFF) ^ rot(c, k1)
            c = (c + b) & 0xFFFFFFFF
            b = ((b - a) & 0xFFFFFFFF) ^ rot(a, k2)
            a = (a + c) & 0xFFFFFFFF
            c = ((c - b) & 0xFFFFFFFF) ^ rot(b, k3)
            b = (b + a) & 0xFFFFFFFF
        at += 12
    x, y, z = struct.unpack("<3I", data[at:].ljust(12, b"\0"))
    a, b, c = (a + x) & 0xFFFFFFFF, (b + y) & 0xFFFFFFFF, (c + z) & 0xFFFFFFFF
    c = ((c ^ b) - rot(b, 14)) & 0xFFFFFFFF
    a = ((a ^ c) - rot(c, 11)) & 0xFFFFFFFF
    b = ((b ^ a) - rot(a, 25)) & 0xFFFFFFFF
    c = ((c ^ b) - rot(b, 16)) & 0xFFFFFFFF
    a = ((a ^ c) - rot(c, 4)) & 0xFFFFFFFF
    b = ((b ^ a) - rot(a, 14)) & 0xFFFFFFFF
    return ((c ^ b) - rot(b, 24)) & 0xFFFFFFFF


def object_headers(data: bytes) -> list[tuple[int, int]]:
    """Return the offsets of object headers and of their checksums (File Format Specification 3.0, IV.A.1.b)."""
    found, at = [], data.find(b"OHDR")
    while at >= 0:
        flags = data[at + 5]
        width = 1 << (flags & 3)
        sizes = at + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        found.append((at, sizes + width + int.from_bytes(data[sizes : sizes + width], "little")))
        at = data.find(b"OHDR", at + 4)
    return found


def repair(data: bytearray, headers: list[tuple[int, int]] | None = None) -> None:
    """Recompute the checksums of all object headers (or of those named), as an attacker would."""
    for start, end in object_headers(bytes(data)) if headers is None else headers:
        struct.pack_into("<I", data, end, lookup3(bytes(data[start:end])))
