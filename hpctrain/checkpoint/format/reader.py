"""Safe reader of a checkpoint file: no pickle, no other file, bounded memory, every byte checked.

It needs h5py and NumPy only, so that it runs on a login node.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.fingerprint import fingerprint
from hpctrain.checkpoint.format.layout import Array, Extent, Record, crc32, differences, digest, manifest, seal
from hpctrain.checkpoint.format.structure import Structure, read_attribute, refusing, unpack, walk
from hpctrain.errors import CheckpointError
from hpctrain.shard import Shard
from hpctrain.util.reading import fill, open_regular

# Superblock version 3 (HDF5 File Format Specification 3.0, II.A.): signature, version, size of offsets, size of
# lengths, flags, base address, address of the extension, address of the end of the file.
_SUPERBLOCK = struct.Struct("<8s4B3Q")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_UNDEFINED_ADDRESS = (1 << 64) - 1
_MOSTLY_HOLES = 1 << 50  # bytes: a larger file must not consist mostly of holes, because reading them would never end
_STEP = 1 << 20  # bytes read at a time: the CRC finds them in the cache
_SHOWN = 5  # differences named in an error; the others are counted


class Reader:
    """Open checkpoint with a valid structure; the bytes of a tensor are checked when they are read.

    Raises ``CheckpointError``, which names the file and the fault, for anything that ``write_file``
    would not have written.
    """

    def __init__(self, path: str | Path, piece: int = layout.PIECE) -> None:
        """Open a file; ``pieces`` yields at most ``piece`` bytes at a time."""
        self.path, self._piece = Path(path), piece
        size = _check_superblock(self.path)
        with ExitStack() as opened:
            with refusing(self.path):
                self._file = opened.enter_context(_open(self.path))
                version = _check_format(self._file, self.path, size)
                found = walk(self._file, str(self.path), size)
                self._handle = int(self._file.id.get_vfd_handle())
            self.size = size
            self.records: dict[str, Record] = found.records
            self.groups = found.groups
            self.offsets = {path: start for path, (start, _) in found.ranges.items() if path in found.records}
            self._extents: dict[str, list[Extent]] = {}
            self._check_manifest(found.texts.get(layout.MANIFEST))
            self._check_seal(found, version)
            self._take_extents(found, version)
            opened.pop_all()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def root(self) -> dict[str, Any]:
        """Return the attributes of the file itself: format, creator, step, world size."""
        return self.values("/")

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the models and optimizers in the file."""
        return fingerprint(self.records.values())

    def values(self, group: str) -> dict[str, Any]:
        """Return the values in a group's attributes; an empty dict for a missing group."""
        with refusing(self.path):
            return unpack(self.groups.get(group, {}), self.path)

    def below(self, group: str) -> dict[str, Record]:
        """Return the tensors below a group, named relative to it."""
        start = group.rstrip("/") + "/"
        return {path.removeprefix(start): record for path, record in self.records.items() if path.startswith(start)}

    def read(self, path: str) -> Array:
        """Return a tensor in its storage type, after its CRC-32 was checked."""
        record = self.records[path]
        array: Array = np.empty(record.shape, dtype=record.storage)
        self.read_box(path, (0,) * len(record.shape), record.shape, array)
        return array

    def read_box(self, path: str, start: tuple[int, ...], extent: tuple[int, ...], out: Array) -> None:
        """Read the box of a tensor that begins at ``start`` into a C-contiguous array of the shape ``extent``.

        Only the extents that the box touches are read, and their CRC-32s compared. If the file has
        no table of extents, all of the tensor is read.
        """
        record = self.records[path]
        if out.shape != extent or out.dtype != record.storage or not out.flags.c_contiguous:
            raise CheckpointError(f"{path} needs a contiguous array of {record.storage} {extent} to be read into")
        data, size = out.reshape(-1).view(np.uint8).data, record.storage.itemsize
        offset = self.offsets.get(path, 0)
        box = Shard(path, record.shape, record.dtype, start, extent, None)
        runs = [(offset + to * size, at * size, count * size) for to, at, count in box.runs()]
        self._read_runs(record, runs, data)

    def _read_runs(self, record: Record, runs: Sequence[tuple[int, int, int]], data: memoryview) -> None:
        """Fill ``data`` from runs (offset in the file, offset in ``data``, length), ascending in both offsets."""
        first = 0
        for extent in self._extents.get(record.path, []):
            begin, end = extent.offset, extent.offset + extent.nbytes
            while first < len(runs) and runs[first][0] + runs[first][2] <= begin:
                first += 1
            if first == len(runs):
                return
            offset, at, length = runs[first]
            if offset <= begin and end <= offset + length:
                self._read_extent(record, extent, data[at + begin - offset : at + end - offset])
            elif offset < end:
                self._read_around(record, extent, runs[first:], data)

    def _read_around(
        self, record: Record, extent: Extent, runs: Sequence[tuple[int, int, int]], data: memoryview
    ) -> None:
        """Read an extent of which only parts are needed, and copy those."""
        piece = memoryview(bytearray(extent.nbytes))
        self._read_extent(record, extent, piece)
        for offset, at, length in runs:
            low, high = max(offset, extent.offset), min(offset + length, extent.offset + extent.nbytes)
            if low >= extent.offset + extent.nbytes:
                return
            data[at + low - offset : at + high - offset] = piece[low - extent.offset : high - extent.offset]

    def _read_extent(self, record: Record, extent: Extent, out: memoryview) -> None:
        crc = 0
        for start in range(0, extent.nbytes, _STEP):
            piece = out[start : start + _STEP]
            self._fill(record.path, piece, extent.offset + start)
            crc = crc32(piece, crc)
        self._check_crc(record, crc, extent.crc32)

    def pieces(self, path: str) -> Iterator[Array]:
        """Yield a tensor's elements in C order, in bounded pieces; raise at the end if its CRC-32 is wrong."""
        record, crc = self.records[path], 0
        buffer = bytearray(min(self._piece, record.nbytes))
        for start in range(0, record.nbytes, self._piece):
            piece = memoryview(buffer)[: min(self._piece, record.nbytes - start)]
            self._fill(path, piece, self.offsets[path] + start)
            crc = crc32(piece, crc)
            yield np.frombuffer(piece, dtype=record.storage)
        self._check_crc(record, crc, record.crc32)

    def verify(self, progress: Callable[[int], object] | None = None) -> None:
        """Read and check every byte of every tensor; ``progress`` gets the number of bytes since its last call."""
        for path in self.records:
            for piece in self.pieces(path):
                if progress:
                    progress(piece.nbytes)

    def _fill(self, what: str, piece: memoryview, offset: int) -> None:
        try:
            missing = fill(self._handle, piece, offset)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot read {what}: {error.strerror}") from error
        if missing:
            raise CheckpointError(f"{self.path}: {what} ends {missing} bytes too early")

    def _check_crc(self, record: Record, crc: int, written: int) -> None:
        if crc != written:
            raise CheckpointError(
                f"{self.path}: {record.path} is damaged: its bytes have the CRC-32 {crc:08x}, written was {written:08x}"
            )

    def _take_extents(self, found: Structure, version: tuple[int, int]) -> None:
        """Store the table of extents, which the seal has verified; files before version 1.2 have no table."""
        if found.table is None and version >= layout.EXTENTS_SINCE:
            raise CheckpointError(f"{self.path} lacks {layout.EXTENTS}")
        filled = [self.records[path] for path in sorted(self.offsets, key=self.offsets.__getitem__)]
        if found.table is None:
            self._extents = {one.path: [Extent(self.offsets[one.path], one.nbytes, one.crc32)] for one in filled}
            return
        for one, of_tensor in zip(filled, layout.by_tensor(found.table, len(filled))):
            layout.check_extents(of_tensor, self.offsets[one.path], one.nbytes, f"{one.path} of {self.path}")
            self._extents[one.path] = of_tensor

    def _check_manifest(self, promised: str | None) -> None:
        """Compare the stored manifest with the contents; no part of the file is trusted before."""
        found = manifest(self.groups, self.records.values())
        stored = self.groups["/"].get(layout.DIGEST)
        if promised is None or stored is None or digest(promised).encode() != stored.tobytes():
            raise CheckpointError(f"{self.path}: {layout.MANIFEST} is damaged: it does not have the digest of the root")
        if promised == found:
            return
        changes = differences(promised, found)
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        raise CheckpointError(f"{self.path} is not as it was written: {', '.join(changes[:_SHOWN])}{more}")

    def _check_seal(self, found: Structure, version: tuple[int, int]) -> None:
        """Compare the seal with the bytes that it covers; files before version 1.1 have no seal."""
        stored = found.texts.get(layout.SEAL)
        if stored is None and version < layout.SEALED_SINCE:
            return
        checked = [each for path, each in found.ranges.items() if path != layout.EXTENTS]  # by other checksums
        if stored != seal(self.size, checked, self._read_at, self._next_data):
            raise CheckpointError(
                f"{self.path}: its structure or {layout.SEAL} is damaged: the bytes outside the tensors do not have "
                "the digest that was written"
            )

    def _read_at(self, offset: int, count: int) -> bytes:
        """Return bytes without the hole at their end, if the filesystem reports holes."""
        data = bytearray(_written(self._handle, offset, count))
        self._fill(layout.SEAL, memoryview(data), offset)
        return bytes(data)

    def _next_data(self, offset: int) -> int:
        """Return the offset of the next written bytes; ``offset`` itself if the filesystem cannot tell."""
        try:
            return os.lseek(self._handle, offset, os.SEEK_DATA)
        except OSError as error:
            return self.size if error.errno == errno.ENXIO else offset


def verify_file(path: str | Path, progress: Callable[[int], object] | None = None) -> None:
    """Raise ``CheckpointError`` unless every stored bit of a file is as written."""
    with Reader(path) as reader:
        reader.verify(progress)


def _check_superblock(path: Path) -> int:
    """Return the size of the file after a check of its first bytes, before HDF5 opens it."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        handle = open_regular(path)
        try:
            status, head = os.fstat(handle), os.pread(handle, _SUPERBLOCK.size, 0)
        finally:
            os.close(handle)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not head.startswith(_SIGNATURE):
        raise CheckpointError(f"{path} is not an HDF5 file" + ("" if status.st_size else ": it is empty"))
    if len(head) < _SUPERBLOCK.size:
        raise CheckpointError(f"{path} is truncated: it has {status.st_size} bytes")
    _, version, offsets, lengths, _, base, extension, end = _SUPERBLOCK.unpack(head)
    if (version, offsets, lengths, base, extension) != (3, 8, 8, 0, _UNDEFINED_ADDRESS):
        raise CheckpointError(f"{path} is an HDF5 file, but not one that hpctrain wrote (superblock version {version})")
    if status.st_size != end:
        what = "is truncated" if status.st_size < end else "has grown"
        raise CheckpointError(f"{path} {what}: {end} bytes were written, it has {status.st_size}")
    if status.st_size > _MOSTLY_HOLES and status.st_blocks * 512 < status.st_size // 1024:
        raise CheckpointError(f"{path} claims {status.st_size} bytes and stores {status.st_blocks * 512}: refused")
    return status.st_size


def _open(path: Path) -> h5py.File:
    """Open without locks, which many parallel filesystems lack, unless this process has the file open with locks."""
    try:
        return h5py.File(path, "r", driver="sec2", locking=False)
    except OSError as error:
        if "locking flag" not in str(error):
            raise
    return h5py.File(path, "r", driver="sec2")


def _written(handle: int, offset: int, count: int) -> int:
    """Return the bytes before the hole at the end of a range; all of them if the filesystem cannot tell."""
    end = offset + count
    try:
        reached = offset
        while (begin := os.lseek(handle, reached, os.SEEK_DATA)) < end:
            reached = os.lseek(handle, begin, os.SEEK_HOLE)
            if reached >= end:
                return count
        return reached - offset
    except OSError as error:
        return reached - offset if error.errno == errno.ENXIO else count  # ENXIO: only a hole up to the end of the file


def _check_format(file: h5py.File, path: Path, size: int) -> tuple[int, int]:
    """Return the version; refuse a foreign file and a newer major version before anything else is read."""
    if "format" not in file.attrs or "format_version" not in file.attrs:
        raise CheckpointError(f"{path} is an HDF5 file, but not a checkpoint: it lacks the attribute format")
    name, version = (
        read_attribute(h5py.h5a.open(file.id, key.encode()), key, f"{path}: /", size).tobytes().rstrip(b"\0").decode()
        for key in ("format", "format_version")
    )
    if name != layout.FORMAT:
        raise CheckpointError(f"{path} has the format {name!r}: expected {layout.FORMAT!r}")
    numbers = layout.format_version(version)
    if numbers[0] > layout.VERSION[0]:
        known = ".".join(map(str, layout.VERSION))
        raise CheckpointError(f"{path} has the format version {version}: this hpctrain reads up to {known}, update it")
    return numbers
