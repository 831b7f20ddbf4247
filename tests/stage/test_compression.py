"""Compressed archives: other programs read them, damage is found, blocks keep their order."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import struct
import zlib
from collections.abc import Iterator

import pytest

from hpctrain.stage.compression import BLOCK, BlockCompressor, decompressed


def compressed(content: bytes, threads: int = 3, piece: int = BLOCK) -> bytes:
    out = io.BytesIO()
    compressor = BlockCompressor(out.write, threads)
    for begin in range(0, len(content), piece):
        assert compressor.write(content[begin : begin + piece]) == min(piece, len(content) - begin)
    compressor.finish()
    return out.getvalue()


def pieces(content: bytes, size: int) -> Iterator[bytes]:
    return (content[begin : begin + size] for begin in range(0, len(content), size))


def some_bytes(size: int) -> bytes:
    """Return bytes of which half can be compressed."""
    draw = random.Random(size)
    return b"".join(bytes(512) + draw.randbytes(512) for _ in range(size // 1024 + 1))[:size]


@pytest.mark.parametrize("size", [1, 1000, BLOCK, BLOCK + 1, 5 * BLOCK + 12345])
def test_gzip_and_this_reader_give_the_content(size: int) -> None:
    content = some_bytes(size)
    file = compressed(content)
    assert gzip.decompress(file) == content
    for piece in (len(file), 4096 * 37):
        blocks = list(decompressed(pieces(file, piece), 2))
        assert b"".join(blocks) == content and max(map(len, blocks)) <= BLOCK


def test_the_bytes_do_not_depend_on_threads_and_sizes_of_writes() -> None:
    content = some_bytes(4 * BLOCK)
    ways = [(1, BLOCK), (4, BLOCK), (2, 2 * BLOCK)] + [(4, BLOCK)] * 10
    assert len({hashlib.sha256(compressed(content, threads, piece)).hexdigest() for threads, piece in ways}) == 1


def test_an_empty_file_has_no_blocks() -> None:
    assert compressed(b"") == b"" and list(decompressed([])) == []


CONTENT = some_bytes(2 * BLOCK)
FILE = compressed(CONTENT)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (FILE[:-1], "ends within a block"),
        (FILE[: len(FILE) // 2], "ends within a block"),
        (FILE[:100_000] + bytes([FILE[100_000] ^ 1]) + FILE[100_001:], "a block is damaged"),
        (FILE[:-8] + bytes([FILE[-8] ^ 1]) + FILE[-7:], "a block is damaged"),
        (FILE + b"x" * 40, "no block where one begins"),
        (gzip.compress(CONTENT), "no block where one begins"),
    ],
    ids=["last byte", "half", "content", "checksum", "more", "other gzip"],
)
def test_damage_is_found(file: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(decompressed(pieces(file, 65536)))


def test_a_block_cannot_fill_the_memory() -> None:
    """A member of 64 MiB that claims to be a block."""
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    content = stream.compress(bytes(64 * BLOCK)) + stream.flush()
    header = bytearray(FILE[:20])
    struct.pack_into("<I", header, 16, 20 + len(content) + 8)
    trailer = struct.pack("<II", zlib.crc32(bytes(64 * BLOCK)), 64 * BLOCK)
    with pytest.raises(ValueError, match="another size than its header says"):
        list(decompressed([bytes(header) + content + trailer]))


def test_an_error_of_the_file_is_raised() -> None:
    def full(content: bytes) -> None:
        raise OSError(28, "No space left on device")

    compressor = BlockCompressor(full, 2)
    with pytest.raises(OSError, match="No space left"):
        for _ in range(20):
            compressor.write(CONTENT)
        compressor.finish()
    compressor.close()
