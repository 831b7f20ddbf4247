"""Documents of a corpus: the source of the Python standard library, or any files; first reading and split."""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import stat
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hpctrain.errors import DataError
from hpctrain.util.reading import open_regular

Kind = Literal["text", "npy", "npz", "images", "parquet", "arrow", "tar", "mds"]  # of the files of a corpus
KINDS: tuple[Kind, ...] = get_args(Kind)
Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")


@dataclass(frozen=True)
class DocumentRange:
    """A byte range of a document; almost always the whole document."""

    source: DocumentSize
    start: int
    stop: int


def is_held_out(name: str, fraction: float, seed: int) -> bool:
    """Return whether a document is held out; this depends on its name, the fraction and the seed alone.

    A document stays in its split when other documents are added or removed, in whatever order they
    are found.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def plan_splits(measured: Sequence[DocumentSize], fraction: float, seed: int) -> dict[Split, list[DocumentRange]]:
    """Return the pieces of each split, in the given order; each byte is in exactly one split.

    If hashing leaves a split empty, as for a single large file, the longest document is cut: its
    beginning is used for training and its end is held out.
    """
    splits: dict[Split, list[DocumentRange]] = {"train": [], "validation": []}
    for found in measured:
        side: Split = "validation" if is_held_out(found.document.name, fraction, seed) else "train"
        splits[side].append(DocumentRange(found, 0, found.length))
    if not all(splits.values()):
        _cut_longest(splits, fraction)
    return splits


def _cut_longest(splits: dict[Split, list[DocumentRange]], fraction: float) -> None:
    pieces = splits["train"] or splits["validation"]
    longest = max(pieces, key=lambda piece: piece.stop, default=None)
    if longest is None or longest.stop < 2:
        raise DataError("corpus too small to hold out a validation split: needs text files with at least 2 bytes")
    cut = min(max(round(longest.stop * (1 - fraction)), 1), longest.stop - 1)
    head, tail = DocumentRange(longest.source, 0, cut), DocumentRange(longest.source, cut, longest.stop)
    position = pieces.index(longest)
    if splits["train"]:
        pieces[position], splits["validation"] = head, [tail]
    else:
        pieces[position], splits["train"] = tail, [head]


BLOCK = 4 << 20  # bytes of a document in memory at a time


@dataclass(frozen=True)
class DocumentSize:
    """Result of reading a document: its length in bytes and its CRC-32."""

    document: Document
    length: int
    crc32: int


def survey(documents: Iterable[Document], block: int = BLOCK) -> tuple[list[DocumentSize], int]:
    """Return the documents that are text, in the given order, and the number of the other ones.

    Text is UTF-8 without NUL bytes (which separate the documents). Empty files are skipped and not
    counted. ``block`` is the number of bytes in memory at a time.
    """
    measured: list[DocumentSize] = []
    skipped = 0
    for document in documents:
        found = _measure(document, block)
        if found is None:
            skipped += 1
        elif found.length:
            measured.append(found)
    return measured, skipped


def fingerprint(measured: Sequence[DocumentSize]) -> str:
    """Return a digest of all names and contents, which is equal only for equal corpora."""
    digest = hashlib.sha256()
    for found in measured:
        digest.update(f"{found.document.name}\0{found.length}\0{found.crc32:08x}\n".encode())
    return digest.hexdigest()


def read_blocks(path: Path, size: int = BLOCK) -> Iterator[bytes]:
    """Yield a file's bytes in blocks. Raises ``DataError`` if it cannot be read."""
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            while block := file.read(size):
                yield block
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _measure(document: Document, size: int) -> DocumentSize | None:
    """Return length and checksum; ``None`` for a file that is not text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    length = crc32 = 0
    try:
        for block in read_blocks(document.path, size):
            if b"\0" in block:
                return None
            decoder.decode(block)
            length, crc32 = length + len(block), zlib.crc32(block, crc32)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return None
    return DocumentSize(document, length, crc32)


# Third-party packages, tests (thousands of near-equal lines), and generated tables: not useful as training text.
_NOT_LIBRARY = {
    "dist-packages",
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


@dataclass(frozen=True)
class Document:
    """A file of the corpus; ``name`` is its path relative to its source, with forward slashes."""

    name: str
    path: Path


def find_documents(sources: Sequence[str | Path] = (), left_out: list[Path] | None = None) -> list[Document]:
    """Return the documents of all sources, sorted by name; without a source, those of the standard library.

    For a folder these are the regular files below it, except hidden files and ``__pycache__``; for
    a file it is the file itself. A file that is found twice counts once. Links to targets outside
    of their folder are skipped and added to ``left_out``. Raises ``DataError`` if a source is
    missing or unreadable, or if no file is found.
    """
    outside: list[Path] = [] if left_out is None else left_out
    found = [document for source in sources for document in _expand(Path(source), outside)] if sources else _library()
    unique = {os.path.realpath(document.path): document for document in reversed(found)}
    if not unique:
        places = ", ".join(str(source) for source in sources) or str(_library_folder())
        raise DataError(f"no file found in {places}: a corpus is text files, or folders that hold some")
    return sorted(unique.values(), key=lambda document: (document.name, str(document.path)))


def name_sources(sources: Sequence[str | Path]) -> list[str]:
    """Return a description of the sources of a corpus."""
    if not sources:
        return [f"python {platform.python_version()} standard library"]
    return [_printable(os.path.abspath(source)) for source in sources]


def _library_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _library() -> list[Document]:
    folder = _library_folder()
    documents = (Document(_relative(path, folder), path) for path in _walk(folder, _NOT_LIBRARY, []))
    return [document for document in documents if document.path.suffix == ".py"]


def _expand(source: Path, outside: list[Path]) -> list[Document]:
    """Return the documents of one given path."""
    try:
        mode = source.stat().st_mode
    except OSError as error:
        raise DataError(f"cannot read corpus {source}: {error.strerror}") from error
    source = Path(os.path.abspath(source))
    if stat.S_ISDIR(mode):
        return [Document(_relative(path, source.parent), path) for path in _walk(source, set(), outside)]
    if not stat.S_ISREG(mode):
        raise DataError(f"cannot read corpus {source}: it is neither a file nor a folder")
    return [Document(_printable(source.name), source)]


def _walk(folder: Path, leave_out: set[str], outside: list[Path]) -> Iterator[Path]:
    """Yield the files below a folder; links to files elsewhere go to ``outside``: another user may own the folder."""
    root = os.path.realpath(folder) + os.sep
    for place, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not _is_noise(name) and name not in leave_out]
        for name in files:
            path = Path(place, name)
            # Sockets, pipes and dangling links are not documents; opening a pipe would block forever.
            if _is_noise(name) or not path.is_file():
                continue
            if path.is_symlink() and not os.path.realpath(path).startswith(root):
                outside.append(path)
            else:
                yield path


def _is_noise(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _refuse(error: OSError) -> None:
    raise DataError(f"cannot read corpus folder {error.filename}: {error.strerror}") from error


def _relative(path: Path, folder: Path) -> str:
    return _printable(path.relative_to(folder).as_posix())


def _printable(name: str | Path) -> str:
    """Return a file name as text that UTF-8 can encode: names on disk may be any bytes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
