"""First reading of every document: test for text, length, checksum."""

from __future__ import annotations

import codecs
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.data.corpus import Document
from hpctrain.errors import DataError
from hpctrain.util.reading import open_regular

BLOCK = 4 << 20  # bytes of a document in memory at a time


@dataclass(frozen=True)
class Measured:
    """Result of reading a document: its length in bytes and its CRC-32."""

    document: Document
    length: int
    crc32: int


def survey(documents: Iterable[Document]) -> tuple[list[Measured], int]:
    """Return the documents that are text, in the given order, and the number of the other ones.

    Text is UTF-8 without NUL bytes (which separate the documents). Empty files are skipped and not
    counted.
    """
    measured: list[Measured] = []
    skipped = 0
    for document in documents:
        found = _measure(document)
        if found is None:
            skipped += 1
        elif found.length:
            measured.append(found)
    return measured, skipped


def fingerprint(measured: Sequence[Measured]) -> str:
    """Return a digest of all names and contents, which is equal only for equal corpora."""
    digest = hashlib.sha256()
    for found in measured:
        digest.update(f"{found.document.name}\0{found.length}\0{found.crc32:08x}\n".encode())
    return digest.hexdigest()


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes in blocks. Raises ``DataError`` if it cannot be read."""
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            while block := file.read(BLOCK):
                yield block
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _measure(document: Document) -> Measured | None:
    """Return length and checksum; ``None`` for a file that is not text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    length = crc32 = 0
    try:
        for block in read_blocks(document.path):
            if b"\0" in block:
                return None
            decoder.decode(block)
            length, crc32 = length + len(block), zlib.crc32(block, crc32)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return None
    return Measured(document, length, crc32)
