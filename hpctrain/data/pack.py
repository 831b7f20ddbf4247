"""Packing of a corpus into one HDF5 file of byte tokens with a held-out split, written atomically."""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from tqdm import tqdm

from hpctrain._version import __version__
from hpctrain.data.corpus import (
    SPLITS,
    DocumentRange,
    Split,
    find_documents,
    fingerprint,
    name_sources,
    plan_splits,
    read_blocks,
    survey,
)
from hpctrain.data.hdf5 import attribute, checksum, open_file
from hpctrain.errors import DataError, SettingsError
from hpctrain.util import atomic


class _Sink(io.FileIO):
    """The file under HDF5: after the first failure, which is stored, all further writes are ignored.

    Note: HDF5 buffers data and cannot give up a file whose disk is full. It tries again at every
    close and at the end of the process, where the library was seen to crash. So HDF5 does not see
    the failure; the code that opened the sink checks ``failure`` and removes the file.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all bytes, or none after a failure; return the full length."""
        view = memoryview(data).cast("B")
        done = 0
        while self.failure is None and done < len(view):
            try:
                done += super().write(view[done:]) or 0
            except OSError as error:
                self.failure = error
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; bytes that could not be written read as zeros, where HDF5 would use random memory."""
        view = memoryview(buffer).cast("B")
        done = super().readinto(view) or 0
        view[done:] = bytes(len(view) - done)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the length if possible."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = error
            return self.tell()


@contextlib.contextmanager
def new_file(out: Path, kind: str, version: int) -> Iterator[h5py.File]:
    """Open a temporary HDF5 file that is renamed to ``out`` when the block ends without an error.

    Missing parent folders are created. After an error the temporary file is removed, and an
    existing file stays.
    """
    if out.is_dir():
        raise DataError(f"cannot write {out}: it is a folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic.private_file(out) as handle, _Sink(handle, "w+", closefd=False) as sink:
            try:
                with h5py.File(sink, "w") as file:
                    file.attrs.update({"format": kind, "format_version": version, "creator": f"hpctrain {__version__}"})
                    file.attrs["created"] = datetime.now(UTC).isoformat(timespec="seconds")
                    yield file
            finally:
                if sink.failure:
                    raise sink.failure
    except (OSError, RuntimeError) as error:
        raise DataError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from error


# The file contains ``/train`` and ``/validation``, each with ``tokens`` (u1; every document is
# followed by a NUL byte), ``offsets`` (the start of each document, and the end of the last one) and
# ``names``. Memory stays bounded: the corpus is read twice, once to measure and once to copy, block
# by block.


FORMAT = "hpctrain-tokens"
FORMAT_VERSION = 1
TOKENIZER = "bytes"
SEPARATOR = b"\0"


@dataclass(frozen=True)
class PackReport:
    """Contents of a packed file; ``written`` is false if the file already existed with the same corpus."""

    path: Path
    written: bool
    tokens: dict[Split, int]
    documents: dict[Split, int]
    skipped: int  # number of files skipped because they are not text
    links: int = 0  # number of links skipped because they lead out of their folder


def pack(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    validation_fraction: float = 0.05,
    seed: int = 0,
    force: bool = False,
    progress: bool = True,
) -> PackReport:
    """Pack the text of files and folders into ``out``; without sources, that of the Python standard library.

    A file with the same corpus, packed in the same way, is not changed; any other file is only
    replaced with ``force``. After a ``DataError`` or ``SettingsError`` no file was written.
    """
    out = Path(out)
    if not 0 < validation_fraction < 1:
        raise SettingsError(f"validation fraction {validation_fraction}: allowed is more than 0 and less than 1")
    links: list[Path] = []
    measured, skipped = survey(find_documents(sources, links))
    if not measured:
        raise DataError(f"no text found in {', '.join(name_sources(sources))}: {skipped} skipped, not being UTF-8 text")
    splits = plan_splits(measured, validation_fraction, seed)
    identity = {
        "documents_sha256": fingerprint(measured),
        "validation_fraction": validation_fraction,
        "seed": seed,
        "tokenizer": TOKENIZER,
        "vocab_size": 256,
    }
    if out.exists() and not out.is_symlink() and any(out.samefile(one.document.path) for one in measured):
        raise DataError(f"{out} is one of the sources: choose another name to write")
    written = force or not _is_current(out, identity)
    if written:
        _write(out, splits, identity, name_sources(sources), progress)
    return PackReport(
        path=out,
        written=written,
        tokens={split: _length(splits[split]) for split in SPLITS},
        documents={split: len(splits[split]) for split in SPLITS},
        skipped=skipped,
        links=len(links),
    )


def _is_current(out: Path, identity: dict[str, object]) -> bool:
    """Return whether ``out`` is up to date. Raises ``DataError`` if it exists and has other contents."""
    if not out.exists():
        return False
    try:
        with open_file(out) as file:
            if attribute(file, "format") != FORMAT:
                reason = "is not a packed corpus"
            elif all(attribute(file, key) == value for key, value in identity.items()):
                return True
            else:
                reason = "was packed from another corpus or with other parameters"
    except DataError:
        reason = "is not a packed corpus"
    raise DataError(f"{out} exists and {reason}: --force replaces it")


def _write(
    out: Path, splits: dict[Split, list[DocumentRange]], identity: dict[str, object], sources: list[str], progress: bool
) -> None:
    total = sum(_length(pieces) for pieces in splits.values())
    # disable=None: a progress bar only on a terminal
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="pack", leave=False, disable=None if progress else True)
    with bar, new_file(out, FORMAT, FORMAT_VERSION) as file:
        file.attrs.update({**identity, "separator": SEPARATOR[0]})
        file.create_dataset("sources", data=sources, dtype=h5py.string_dtype())
        for split in SPLITS:
            _write_split(file.create_group(split), splits[split], bar)
        file.flush()
        for split in SPLITS:
            tokens = file[split]["tokens"]
            if checksum(tokens) != tokens.attrs["crc32"]:
                raise DataError(f"cannot write {out}: what was written reads back differently")


def _write_split(group: h5py.Group, pieces: list[DocumentRange], bar: tqdm[None]) -> None:
    tokens = group.create_dataset("tokens", shape=(_length(pieces),), dtype="u1")
    position = crc32 = 0
    for piece in pieces:
        for block in _blocks(piece):
            tokens[position : position + len(block)] = np.frombuffer(block, np.uint8)
            position, crc32 = position + len(block), zlib.crc32(block, crc32)
            bar.update(len(block))
    tokens.attrs["crc32"] = crc32
    lengths = [piece.stop - piece.start + len(SEPARATOR) for piece in pieces]
    group.create_dataset("offsets", data=np.cumsum([0, *lengths], dtype=np.int64))
    names = [piece.source.document.name for piece in pieces]
    group.create_dataset("names", data=names, dtype=h5py.string_dtype())


def _blocks(piece: DocumentRange) -> Iterator[bytes]:
    """Yield the bytes of a piece and the separator. Raises ``DataError`` if the file has changed since the survey."""
    document, position, crc32 = piece.source.document, 0, 0
    for block in read_blocks(document.path):
        crc32 = zlib.crc32(block, crc32)
        wanted = block[max(piece.start - position, 0) : max(piece.stop - position, 0)]
        position += len(block)
        if position > piece.source.length:
            break
        if wanted:
            yield wanted
    if (position, crc32) != (piece.source.length, piece.source.crc32):
        raise DataError(f"{document.path} changed while it was packed: pack again when no other process writes to it")
    yield SEPARATOR


def _length(pieces: list[DocumentRange]) -> int:
    return sum(piece.stop - piece.start + len(SEPARATOR) for piece in pieces)
