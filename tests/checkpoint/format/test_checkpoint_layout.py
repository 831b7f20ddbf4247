"""Contents of checkpoint files: names, element types, attributes, manifest and seal."""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.draft import pack, to_array
from hpctrain.checkpoint.format.layout import DIGEST, Record, differences, digest, manifest, overlap, seal
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.format.reader import Reader, verify_file
from hpctrain.checkpoint.format.structure import from_array, unpack
from hpctrain.checkpoint.format.writer import write_file
from hpctrain.checkpoint.retention import step_of
from hpctrain.errors import CheckpointError, UsageError


def test_dots_in_names_are_kept() -> None:
    assert layout.child(layout.MODEL, "h.0.attn.weight") == "/model/h.0.attn.weight"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\nb", "a\0b", "\x1b[31m", "\ud800", "x" * 1025])
def test_names_that_are_not_a_single_path_component_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be stored"):
        layout.child(layout.MODEL, name)


def test_storage_has_the_width_of_the_torch_dtype() -> None:
    for name, storage in layout.STORAGE.items():
        assert storage.itemsize == getattr(torch, name).itemsize
        assert storage.str[0] in "<|"


def test_unknown_dtype_error_lists_the_known_dtypes() -> None:
    with pytest.raises(CheckpointError, match="complex64: a checkpoint holds float64, float32"):
        layout.storage_of("complex64", "w")


def test_step_file_names_contain_the_step() -> None:
    assert [step_of(f"step_{digits}.h5") for digits in ("00001200", "123456789")] == [1200, 123456789]
    for name in (".step_00001200.h5.tmp-host-1", "step_1.h5.bak", "step_.h5", "xstep_1.h5"):
        assert step_of(name) is None


# Conversion between Python values and HDF5 attributes, in both directions without change ------------------------------


@pytest.mark.parametrize(
    "value", [0, -(1 << 63), 1.5, -0.0, math.inf, "", "ünïcode", np.uint32(1 << 31), ("a", "längere"), True and 7]
)
def test_plain_values_round_trip(value: Any) -> None:
    back = from_array(to_array(value))
    assert back == value and type(back) is type(value)


JSON = [True, False, None, [1, 2.5, "x"], {"a": {"b": [None]}}, 1 << 80, "nul\0inside", [], {}]


@pytest.mark.parametrize("value", [*JSON, 3, 0.1, "text", np.float32(0.5)])
def test_packed_values_round_trip(value: Any) -> None:
    packed = {name: to_array(each) for name, each in pack({"key": value}, "train").items()}
    back = unpack(packed, "file")["key"]
    assert back == value
    assert type(back) is type(value.item() if isinstance(value, np.generic) else value)


def test_values_that_json_cannot_hold_are_named() -> None:
    with pytest.raises(UsageError, match="optimizer of train is of type set"):
        pack({"optimizer": {1, 2}}, "train")
    with pytest.raises(UsageError, match=r"must not end in \.json"):
        pack({"a.json": 1}, "train")
    with pytest.raises(CheckpointError, match="cannot be stored"):
        pack({"a/b": 1}, "train")


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_invalid_json_in_a_file_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="not valid JSON"):
        unpack({"a.json": to_array(text)}, "file")


# Manifest: missing, added and altered entries are found ---------------------------------------------------------------


def test_the_manifest_text_follows_the_specification() -> None:
    crc = np.array(7, dtype="<u4")
    record = Record("/model/a", (2, 3), "bfloat16", 7, {"crc32": crc})
    text = manifest({"/": {"step": to_array(3), DIGEST: to_array("x")}}, [record])
    assert text.splitlines() == [
        f"attribute\t/\tstep\t<i8\tscalar\t{zlib.crc32((3).to_bytes(8, 'little')):08x}",
        f"attribute\t/model/a\tcrc32\t<u4\tscalar\t{zlib.crc32(bytes([7, 0, 0, 0])):08x}",
        "dataset\t/model/a\t<u2\t2x3",
        "group\t/",
    ]
    assert digest(text) == hashlib.sha256(text.encode()).hexdigest()


def test_differences_are_named() -> None:
    one, two = Record("/model/a", (2,), "float32", 7), Record("/model/b", (), "int64", 8)
    full = manifest({"/": {"step": to_array(3)}}, [one, two])
    assert differences(full, manifest({"/": {"step": to_array(3)}}, [one])) == ["dataset /model/b is missing"]
    assert differences(manifest({"/": {}}, [one, two]), full) == ["attribute step of / was added"]
    assert differences(full, manifest({"/": {"step": to_array(4)}}, [one, two])) == ["attribute step of / is altered"]
    assert differences(full, full) == []


def test_a_reader_written_from_the_specification_agrees(small_file: Path) -> None:
    """Read the manifest as docs/checkpoint-format.md specifies, with only h5py and zlib."""

    def shape(dims: tuple[int, ...]) -> str:
        return "x".join(map(str, dims)) if dims else "scalar"

    lines = []
    with h5py.File(small_file, "r") as file:
        things = {"/": file}
        file.visititems(lambda name, each: things.__setitem__("/" + name, each))
        text, _, _ = things.pop("/manifest")[()], things.pop("/extents"), things.pop("/seal")
        for path, each in things.items():
            if isinstance(each, h5py.Dataset):
                lines.append(f"dataset\t{path}\t{each.dtype.str}\t{shape(each.shape)}")
                assert zlib.crc32(each[()].tobytes()) == each.attrs["crc32"]
            else:
                lines.append(f"group\t{path}")
            for name, value in each.attrs.items():
                value = np.asarray(value)
                if name != "manifest_sha256":
                    crc = f"{zlib.crc32(value.tobytes()):08x}"
                    lines.append(f"attribute\t{path}\t{name}\t{value.dtype.str}\t{shape(value.shape)}\t{crc}")
        assert hashlib.sha256(text).hexdigest().encode() == file.attrs["manifest_sha256"]
    assert "".join(line + "\n" for line in sorted(lines)).encode() == text


# Seal of a checkpoint file: it covers all but tensors, manifest and itself, as docs/checkpoint-format.md states -------


def by_the_book(path: Path) -> tuple[str, str, set[int]]:
    """Return the seal computed as the page describes, the stored seal, and the offsets that it covers (with h5py)."""
    data, own = path.read_bytes(), set[int]()
    with h5py.File(path, "r") as file:

        def note(name: str, item: object) -> None:
            if name != "extents" and isinstance(item, h5py.Dataset) and item.id.get_offset() is not None:
                own.update(range(item.id.get_offset(), item.id.get_offset() + item.id.get_storage_size()))

        file.visititems(note)
        stored = file["/seal"][()].decode()
    outside = [at for at in range(len(data)) if at not in own]
    digest = hashlib.sha256(struct.pack("<Q", len(data)))
    starts = [at for at in outside if at == 0 or at - 1 in own]
    for start in starts:
        stop = next((at for at in range(start, len(data)) if at in own), len(data))
        for at in range(start, stop, 1 << 20):
            rest = data[at : min(stop, at + (1 << 20))].rstrip(b"\0")
            if rest:
                digest.update(struct.pack("<QQ", at, len(rest)) + rest)
    return digest.hexdigest(), stored, set(outside)


@pytest.fixture
def paged(tmp_path: Path) -> Path:
    """Write a file whose tensors are aligned to pages, with unused bytes between them."""
    sources = [Source.of(f"/model/{name}", np.arange(1100, dtype="<f4")) for name in "abc"]
    write_file(tmp_path / "p.h5", [*sources, Source.of("/model/d", np.array(1.5))], {"/": {"step": 1}}, 4096)
    return tmp_path / "p.h5"


def test_the_seal_follows_the_specification(paged: Path, small_file: Path) -> None:
    for path in (paged, small_file):
        computed, stored, _ = by_the_book(path)
        assert computed == stored and len(stored) == 64


def test_the_seal_hashes_chunks_as_specified() -> None:
    data = bytearray(3 << 20)
    data[5], data[(1 << 20) + 9], data[-1] = 1, 2, 3

    def read(at: int, count: int) -> bytes:
        assert count <= 1 << 20
        return bytes(data[at : at + count])

    expected = hashlib.sha256(struct.pack("<Q", len(data)))
    first, second = 10, 10 + (1 << 20)
    expected.update(struct.pack("<QQ", 0, 6) + data[:6])
    expected.update(struct.pack("<QQ", first, second - first) + data[first:second])
    expected.update(struct.pack("<QQ", second + (1 << 20), (1 << 20) - 10) + data[second + (1 << 20) :])
    assert seal(len(data), [(6, 4)], read) == expected.hexdigest()


def test_every_unused_byte_is_covered(paged: Path) -> None:
    """This includes bytes that HDF5 never reads: after a flip there HDF5 opens the file, but the reader refuses it."""
    data, (_, _, outside) = bytearray(paged.read_bytes()), by_the_book(paged)
    empty = [at for at in sorted(outside) if at >= 900 and not any(data[at - 900 : at + 900])]  # no header is all zeros
    unused = [at for at in empty if set(range(at - 900, at + 900)) <= outside][::20]
    assert len(unused) > 40
    for at in unused:
        paged.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
        with h5py.File(paged, "r") as file:
            assert file["/model/a"][5] == 5
        with pytest.raises(CheckpointError, match="its structure or /seal is damaged"):
            Reader(paged)


def test_the_seal_itself_is_covered(paged: Path) -> None:
    data, (_, stored, _) = paged.read_bytes(), by_the_book(paged)
    paged.write_bytes(data.replace(stored.encode(), stored[::-1].encode()))
    with pytest.raises(CheckpointError, match="its structure or /seal is damaged"):
        verify_file(paged)


def test_a_file_of_version_1_0_has_no_seal_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "COMMON", (1, 0))
    write_file(tmp_path / "old.h5", [Source.of("/model/a", np.ones(3))], {})
    with h5py.File(tmp_path / "old.h5", "r+", libver=("v110", "v110")) as file:
        del file["/seal"], file["/extents"]
    monkeypatch.undo()
    with Reader(tmp_path / "old.h5") as reader:
        reader.verify()
        assert reader.root["format_version"] == "1.0"


def test_a_file_whose_seal_was_removed_is_refused(paged: Path) -> None:
    with h5py.File(paged, "r+", libver=("v110", "v110")) as file:
        del file["/seal"]
    with pytest.raises(CheckpointError, match="its structure or /seal is damaged"):
        Reader(paged)


def test_overlap_returns_the_first_overlapping_extent() -> None:
    assert overlap([]) is None and overlap([(8, 4), (0, 8), (12, 1)]) is None
    assert overlap([(8, 4), (0, 9)]) == (8, 4)
