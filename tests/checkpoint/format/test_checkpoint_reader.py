"""Detection of damage by the reader, which names the file and the damaged item."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.reader import Reader, verify_file
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.errors import CheckpointError

Contents = dict[str, object]


def contents(path: Path) -> Contents:
    """Return every value of the file as a reader returns it."""
    with Reader(path) as reader:
        values: Contents = {group: reader.values(group) for group in reader.groups}
        for name, record in reader.records.items():
            extra = {key: array.tobytes() for key, array in record.attributes.items()}
            values[name] = (record, extra, reader.read(name).tobytes())
        return values


@pytest.fixture
def mutate(small_file: Path) -> Callable[[Callable[[bytearray], None]], Path]:
    original = small_file.read_bytes()

    def apply(change: Callable[[bytearray], None]) -> Path:
        data = bytearray(original)
        change(data)
        small_file.write_bytes(data)
        return small_file

    return apply


def test_a_flipped_bit_of_a_tensor_is_reported_by_its_name(
    small_file: Path, mutate: Callable[[Callable[[bytearray], None]], Path]
) -> None:
    offsets = _offsets(small_file)
    numbers = [8 * at + bit for start, count in offsets for at in range(start, start + count) for bit in range(8)]
    assert len(numbers) == 8 * (24 + 8)
    for number in numbers:

        def flip(bytes_: bytearray, number: int = number) -> None:
            bytes_[number // 8] ^= 1 << number % 8

        with pytest.raises(CheckpointError, match="/model/(a.weight|b) is damaged: its bytes have the CRC-32"):
            contents(mutate(flip))


def _offsets(path: Path) -> list[tuple[int, int]]:
    with h5py.File(path, "r") as file:
        tensors = [file["/model/a.weight"], file["/model/b"]]
        return [(tensor.id.get_offset(), tensor.id.get_storage_size()) for tensor in tensors]


def test_truncation_at_any_length_is_refused(small_file: Path) -> None:
    data = small_file.read_bytes()
    for length in [0, 1, 7, 8, 9, 47, 48, 49, *range(50, len(data), 97), len(data) - 1]:
        small_file.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=re.escape(str(small_file))):
            verify_file(small_file)
    with pytest.raises(CheckpointError, match=f"truncated: {len(data)} bytes were written, it has {len(data) - 1}"):
        verify_file(small_file)


def test_a_file_with_appended_bytes_is_refused(small_file: Path) -> None:
    data = small_file.read_bytes()
    small_file.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match=f"has grown: {len(data)} bytes were written, it has {len(data) + 1}"):
        verify_file(small_file)


WRONG_DATA: dict[str, tuple[np.ndarray, Callable[[bytes], bytes]]] = {
    "zeroed page": (np.arange(4096), lambda data: bytes(4096) + data[4096:]),
    "swapped pages": (np.arange(4096), lambda data: data[4096:8192] + data[:4096] + data[8192:]),
    # HDF5's own fletcher32 does not distinguish the 16-bit words 0xFFFF and 0x0000.
    "ones for zeros": (np.zeros(64), lambda data: b"\xff\xff" + data[2:]),
    # The layout exists, but the data were never written: the extents hold the disk's previous contents.
    "killed writer": (np.ones(64), lambda data: bytes(len(data))),
}


@pytest.mark.parametrize("name", WRONG_DATA)
def test_wrong_data_are_reported_by_the_tensor_name(tmp_path: Path, name: str) -> None:
    path, array, change = tmp_path / "p.h5", WRONG_DATA[name][0].astype("<f4"), WRONG_DATA[name][1]
    write_file(path, [Source.of("/model/w", array), Source.of("/model/v", np.ones(9))], {})
    with h5py.File(path, "r") as file:
        start = file["/model/w"].id.get_offset()
    with open(path, "r+b") as raw:
        raw.seek(start)
        raw.write(change(array.tobytes()))
    with pytest.raises(CheckpointError, match="/model/w is damaged"):
        verify_file(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.__delitem__("/model/b"), "dataset /model/b is missing"),
        (lambda file: file["/model"].move("b", "c"), "dataset /model/b is missing, dataset /model/c was added"),
        (lambda file: file.attrs.modify("step", np.int64(4)), "attribute step of / is altered"),
        (lambda file: file["/train"].attrs.__delitem__("lr"), "attribute lr of /train is missing"),
        (lambda file: file["/train"].attrs.create("more", np.int64(1)), "attribute more of /train was added"),
        (lambda file: file.create_group("more"), "group /more was added"),
        (lambda file: file.__delitem__("manifest"), "/manifest is damaged"),
        (lambda file: file.attrs.__delitem__("manifest_sha256"), "/manifest is damaged"),
        (lambda file: file["/model/b"].attrs.modify("crc32", np.uint32(1)), "attribute crc32 of /model/b is altered"),
    ],
)
def test_changes_by_another_program_are_named(
    small_file: Path, change: Callable[[h5py.File], object], message: str
) -> None:
    with h5py.File(small_file, "r+", libver=("v110", "v110")) as file:
        change(file)
    with pytest.raises(CheckpointError, match=message) as caught:
        verify_file(small_file)
    assert str(small_file) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", bytes(100), b"\x80\x02}q\x00."])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f.h5"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} is (not an HDF5 file|truncated)"):
        Reader(path)


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file|No such file"):
        Reader(tmp_path / "none.h5")
    with pytest.raises(CheckpointError, match="directory|not a regular file"):
        Reader(tmp_path)
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Reader(tmp_path / "pipe.h5")


def test_reading_into_memory_of_wrong_shape_or_type_is_refused(small_file: Path) -> None:
    with Reader(small_file) as reader:
        for wrong in (np.empty((3, 2), "<f4"), np.empty((2, 3), "<f8"), np.empty((3, 2), "<f4").T):
            with pytest.raises(CheckpointError, match="needs a contiguous array of float32"):
                reader.read_box("/model/a.weight", (0, 0), (2, 3), wrong)


def test_a_file_open_in_this_process_can_be_read(small_file: Path) -> None:
    with h5py.File(small_file, "r") as file, Reader(small_file) as reader:
        assert reader.read("/model/b") == file["/model/b"][()]


def test_progress_counts_every_byte(small_file: Path) -> None:
    told: list[int] = []
    verify_file(small_file, told.append)
    assert sum(told) == 24 + 8


def test_newer_major_version_is_refused_and_newer_minor_is_not(tmp_path: Path) -> None:
    for version in ((1, 9), (2, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "COMMON", version)
            sources = [Source.of("/later/x", np.zeros(2, dtype="<f4"))]
            write_file(tmp_path / f"{version[0]}.h5", sources, {}, verify=False)
    with Reader(tmp_path / "1.h5") as reader:
        assert list(reader.records) == ["/later/x"]
    with pytest.raises(CheckpointError, match="format version 2.0: this hpctrain reads up to 1.3, update it"):
        Reader(tmp_path / "2.h5")


def test_a_file_with_another_format_name_is_refused(small_file: Path) -> None:
    with h5py.File(small_file, "r+", libver=("v110", "v110")) as file:
        file.attrs.create("format", np.array(b"hpctrain-chockpoint"), dtype="S19")
    with pytest.raises(CheckpointError, match="has the format 'hpctrain-chockpoint'"):
        Reader(small_file)
