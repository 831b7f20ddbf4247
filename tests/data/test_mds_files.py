"""MDS datasets: values as the format defines them, and errors of damaged, compressed and unknown shards."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.mds_sets import Column, read_index, write_index, write_mds
from torch.utils.data import DataLoader

from hpctrain.data.shards.mds import MdsDataset
from hpctrain.errors import DataError

Image = pytest.importorskip("PIL.Image")
CHANCE = np.random.default_rng(0)
PIXELS = CHANCE.integers(0, 256, (4, 6, 3), np.uint8)


def jpeg() -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "JPEG")
    return file.getvalue()


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    return file.getvalue()


def raw(mode: bytes = b"RGB") -> bytes:
    return struct.pack("<3I", 6, 4, len(mode)) + mode + PIXELS.tobytes()


def listed(*pieces: bytes, before: bytes = b"\0" * 4) -> bytes:
    return before + struct.pack(f"<{len(pieces) + 1}I", len(pieces), *map(len, pieces)) + b"".join(pieces)


def of_jpeg() -> Any:
    return np.asarray(Image.open(io.BytesIO(jpeg())))


NUMBERS = np.arange(6, dtype="<i2").reshape(2, 3)
VALUES: list[tuple[str, bytes, Any]] = [
    ("bytes", b"\0\1", b"\0\1"),
    ("bytes", b"", b""),
    ("str", "süß".encode(), "süß"),
    ("json", b'{"a": [1]}', {"a": [1]}),
    ("int", struct.pack("<q", -(2**62)), -(2**62)),
    ("uint8", b"\xff", 255),
    ("uint16", b"\1\2", 513),
    ("uint32", b"\0\0\0\x80", 2**31),
    ("uint64", b"\xff" * 8, 2**64 - 1),
    ("int8", b"\xff", -1),
    ("int16", b"\xfe\xff", -2),
    ("int32", b"\0\0\0\x80", -(2**31)),
    ("int64", b"\xff" * 8, -1),
    ("float16", struct.pack("<e", 0.5), 0.5),
    ("float32", struct.pack("<f", -2.5), -2.5),
    ("float64", struct.pack("<d", 1 / 3), 1 / 3),
    ("str_int", b"1" * 30, int("1" * 30)),
    ("str_float", b"1e-3", 1e-3),
    ("str_decimal", b"1.10", Decimal("1.10")),
    ("ndarray", b"\x11\x08\x02\x03" + NUMBERS.tobytes(), NUMBERS),
    ("ndarray", b"\x11\x09\x02\0\x03\0" + NUMBERS.tobytes(), NUMBERS),
    ("ndarray", b"\x42\x06\x01\0\0\0" + b"\0" * 8, np.zeros(1)),
    ("ndarray:int16", b"\x08\x02\x03" + NUMBERS.tobytes(), NUMBERS),
    ("ndarray:int16:2,3", NUMBERS.tobytes(), NUMBERS),
    ("ndarray:float16:3", np.ones(3, "<f2").tobytes(), np.ones(3, "f2")),
    ("jpeg", jpeg(), of_jpeg()),
    ("png", png(), PIXELS),
    ("pil", raw(), PIXELS),
    ("jpegarray", listed(jpeg(), jpeg(), before=b""), [of_jpeg()] * 2),
    ("jpeg_array", listed(jpeg(), before=b""), [of_jpeg()]),
    ("list[jpeg]", listed(jpeg()), [of_jpeg()]),
    ("list[png]", listed(png(), png(), png()), [PIXELS] * 3),
    ("list[pil]", listed(raw()), [PIXELS]),
]


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return found.numpy().dtype == expected.dtype and np.array_equal(found.numpy(), expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    return type(found) is type(expected) and bool(found == expected)


@pytest.mark.parametrize("fixed", [False, True])
def test_every_encoding_has_its_value(tmp_path: Path, fixed: bool) -> None:
    columns: list[Column] = [
        (f"c{number:02d}", encoding, len(data) if fixed and data else None)
        for number, (encoding, data, _) in enumerate(VALUES)
    ]
    dataset = MdsDataset(write_mds(tmp_path / "x", columns, [[data for _, data, _ in VALUES]] * 3))
    assert dataset.columns == {name: encoding for name, encoding, _ in columns}
    for sample in dataset:
        assert list(sample) == [name for name, _, _ in columns]
        for (encoding, _, expected), value in zip(VALUES, sample.values()):
            assert _equal(value, expected), encoding


COLUMNS: list[Column] = [("number", "int", 8), ("text", "str", None), ("x", "ndarray:float32:2", 8)]


def _folder(path: Path, count: int = 10, first: int = 0, **options: Any) -> Path:
    samples = [
        (struct.pack("<q", number), b"text " * (number % 7), struct.pack("<2f", number, -number))
        for number in range(first, first + count)
    ]
    return write_mds(path, COLUMNS, samples, **options)


def _numbers(dataset: MdsDataset) -> list[int]:
    return [sample["number"] for sample in dataset]


def test_samples_are_numbered_across_shards_and_folders(tmp_path: Path) -> None:
    dataset = MdsDataset([_folder(tmp_path / "a", 10), _folder(tmp_path / "b", 5, first=10)])
    assert len(dataset) == 15 and _numbers(dataset) == list(range(15)) and len(dataset.files) == 5
    order = [*CHANCE.permutation(15).tolist(), 4, 4]
    for number, sample in zip(order, dataset.__getitems__(order)):
        assert sample["number"] == number and sample["text"] == "text " * (number % 7)
        assert torch.equal(sample["x"], torch.tensor([number, -number], dtype=torch.float32))
    with pytest.raises(DataError, match="no sample 15 in .*a: samples are numbered 0 to 14"):
        dataset.__getitems__([0, 15])


def test_fields_select_columns(tmp_path: Path) -> None:
    columns: list[Column] = [("a", "pkl", None), ("b", "str", None), ("c", "unknown", 3), ("d", "int", 8)]
    folder = write_mds(tmp_path / "x", columns, [(b"pppp", b"text", b"ccc", struct.pack("<q", 7))])
    assert list(MdsDataset(folder, fields=["d", "b"])) == [{"b": "text", "d": 7}]
    assert list(MdsDataset(folder, fields="d")) == [{"d": 7}]
    for fields, message in (
        (None, "column a has the encoding pkl, which is refused, because unpickling executes code"),
        ("c", "column c has the unknown encoding 'unknown'; allowed are bytes, float16, .*ndarray"),
        ("e", "index.json has no column 'e'; it has a, b, c, d"),
        ((), "fields is empty"),
    ):
        with pytest.raises(DataError, match=message):
            MdsDataset(folder, fields=fields)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_data_loader_return_the_same(tmp_path: Path, workers: int) -> None:
    dataset = MdsDataset(_folder(tmp_path / "x", 20))
    assert dataset[0]["number"] == 0
    loader: Any = DataLoader(dataset, batch_size=3, num_workers=workers)  # type: ignore[arg-type]
    assert torch.cat([batch["number"] for batch in loader]).tolist() == list(range(20))
    assert len(pickle.loads(pickle.dumps(dataset))) == 20


# Shards that differ from the index ------------------------------------------------------------------------------------


def test_every_changed_byte_of_the_offsets_is_noticed(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "x", 4)
    path = folder / "shard.00000.mds"
    whole = path.read_bytes()
    for at in range(4 * 6):
        damaged = bytearray(whole)
        damaged[at] ^= 0x11
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="is damaged|is truncated"):
            _numbers(MdsDataset(folder))


def test_sizes_of_columns_that_do_not_add_up_are_noticed(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "x", 4)
    path = folder / "shard.00000.mds"
    whole = bytearray(path.read_bytes())
    whole[struct.unpack_from("<I", whole, 12)[0]] += 1
    path.write_bytes(whole)
    dataset = MdsDataset(folder)
    assert dataset[1]["number"] == 1
    with pytest.raises(DataError, match="shard.00000.mds: sample 2 is damaged: its columns have 31 bytes, it has 30"):
        dataset[2]


@pytest.mark.parametrize(
    "encoding, data",
    [
        ("int", b"\0" * 7),
        ("str", b"\xff"),
        ("json", b"{"),
        ("str_int", b"1.5"),
        ("ndarray", b""),
        ("ndarray", b"\x0c\x08\x02\x03" + b"\0" * 12),
        ("ndarray", b"\x11\x08\x02\x03" + b"\0" * 11),
        ("ndarray", b"\x11\x13" + b"\xff" * 8 * 4 + b"\0\0"),
        ("ndarray:int16:2,3", b"\0" * 10),
        ("jpeg", jpeg()[:100]),
        ("png", b""),
        ("pil", raw()[:-1]),
        ("pil", raw(b"P")),
        ("pil", b"\0" * 8),
        ("list[png]", listed(png())[:-1]),
        ("list[png]", listed(png()) + b"x"),
        ("jpegarray", struct.pack("<I", 2**32 - 1)),
    ],
)
def test_values_that_do_not_decode_are_refused(tmp_path: Path, encoding: str, data: bytes) -> None:
    folder = write_mds(tmp_path / "x", [("a", "int", 8), ("bad", encoding, None)], [(bytes(8), data)])
    with pytest.raises(DataError, match=r"shard.00000.mds: sample 0: cannot decode the column bad \(.*\): .+; repair"):
        MdsDataset(folder)[0]
    assert MdsDataset(folder, fields="a")[0] == {"a": 0}


def test_hashes_are_compared_if_requested(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "x", 9)
    assert len(MdsDataset(folder, verify=True)) == 9
    path = folder / "shard.00001.mds"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert len(MdsDataset(folder)) == 9
    with pytest.raises(DataError, match="shard.00001.mds is damaged: its sha1 is not that of index.json"):
        MdsDataset(folder, verify=True)
    with pytest.raises(DataError, match="shard.00000.mds has no hash in index.json; use verify=False"):
        MdsDataset(_folder(tmp_path / "y", hashed=False), verify=True)
    index = read_index(folder)
    index["shards"][0]["raw_data"]["hashes"] = {"xxh_none": "0"}
    write_index(folder, index)
    with pytest.raises(ValueError, match="hash 'xxh_none'"):
        MdsDataset(folder, verify=True)


def test_missing_truncated_and_changed_shards_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "x", 9)
    path = folder / "shard.00002.mds"
    dataset = MdsDataset(folder)
    assert dataset[8]["number"] == 8
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match="shard.00002.mds has changed since its index was made"):
        dataset[8]
    os.truncate(path, 20)
    with pytest.raises(DataError, match="shard.00002.mds has 20 bytes, index.json says "):
        MdsDataset(folder)
    path.unlink()
    with pytest.raises(DataError, match="the shard .*shard.00002.mds is missing"):
        MdsDataset(folder)


def test_compressed_shards_are_refused_with_the_command_that_helps(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "x", 4)
    index = read_index(folder)
    index["shards"][0] |= {"zip_data": {"basename": "shard.00000.mds.zstd"}, "compression": "zstd:16"}
    write_index(folder, index)
    assert len(MdsDataset(folder)) == 4  # decompressed already
    (folder / "shard.00000.mds").rename(folder / "shard.00000.mds.zstd")
    with pytest.raises(DataError, match="is compressed: .* zstd -d < .*shard.00000.mds.zstd > .*shard.00000.mds$"):
        MdsDataset(folder)


def _set(*keys: Any, value: Any) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for key in keys[:-1]:
            index = index[key]
        index[keys[-1]] = value

    return change


SHARD = ("shards", 0)


@pytest.mark.parametrize(
    "change, message",
    [
        (_set("version", value=1), "has version 1; allowed is 2"),
        (_set("shards", value=[]), "has no samples"),
        (_set("shards", value=None), "is damaged: TypeError"),
        (_set(*SHARD, value={}), "is damaged: KeyError"),
        (_set(*SHARD, "format", value="csv"), "format 'csv of version 2'; allowed is mds"),
        (_set(*SHARD, "version", value=3), "of version 3"),
        (_set(*SHARD, "samples", value=-1), "negative sizes"),
        (_set(*SHARD, "samples", value=3), "begins with 4 samples at offsets .* expected 3"),
        (_set(*SHARD, "samples", value="x"), "is damaged: ValueError"),
        (_set(*SHARD, "column_names", value=["a"]), "has 1 columns, 3 encodings"),
        (_set(*SHARD, "column_encodings", value=[1, 2, 3]), "is damaged: AttributeError"),
        (_set(*SHARD, "column_encodings", value=["int", "str", "ndarray:x"]), "unknown encoding 'ndarray:x'"),
        (_set(*SHARD, "raw_data", "basename", value="../y/shard.00000.mds"), "allowed are files in its folder"),
        (_set(*SHARD, "raw_data", "basename", value="/etc/passwd"), "allowed are files in its folder"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    folder = _folder(tmp_path / "x", 4)
    index = read_index(folder)
    change(index)
    write_index(folder, index)
    with pytest.raises(DataError, match=message):
        MdsDataset(folder)[0]


def test_a_folder_without_an_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="cannot read .*/index.json: No such file .*; a folder of MDS shards has an index"
    ):
        MdsDataset(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"version": 2})[:-1])
    with pytest.raises(DataError, match="index.json: it is not JSON"):
        MdsDataset(tmp_path)


@pytest.mark.ranks(2, 3)
def test_ranks_divide_the_checks_and_all_raise_an_error(comm: Any, shared_tmp_path: Path) -> None:
    folder = shared_tmp_path / "x"
    if comm.rank == 0:
        _folder(folder, 20)
    comm.barrier()
    dataset = MdsDataset(folder, verify=True, comm=comm)
    assert _numbers(dataset) == list(range(20))
    comm.barrier()
    if comm.rank == 0:
        os.truncate(folder / "shard.00001.mds", 20)
    comm.barrier()
    with pytest.raises(DataError, match="rank 1: .*shard.00001.mds has 20 bytes"):
        MdsDataset(folder, comm=comm)
