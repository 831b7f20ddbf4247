"""Descriptions of data files: they agree with h5py, and show damage."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.data.dataset import write_arrays
from hpctrain.data.describe import describe, render
from hpctrain.data.pack import pack
from hpctrain.errors import DataError


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text("once upon a time " * 50)
    return pack([tmp_path / "book.txt"], tmp_path / "book.h5", validation_fraction=0.1).path


def test_token_files_are_described(packed: Path, tmp_path: Path) -> None:
    found = json.loads(json.dumps(describe(packed)))
    assert (found["format"], found["vocab_size"], found["tokenizer"]) == ("hpctrain-tokens", 256, "bytes")
    assert found["sources"] == [str(tmp_path / "book.txt")]
    assert [(d["dataset"], d["shape"], d["documents"], d["crc32"]) for d in found["datasets"]] == [
        ("/train/tokens", [766], 1, "ok"),
        ("/validation/tokens", [86], 1, "ok"),
    ]
    text = render(found)
    assert "vocab_size:          256" in text and str(tmp_path / "book.txt") in text
    assert text.splitlines()[-1].split() == ["/validation/tokens", "86", "uint8", "1", "86", "ok"]


def test_array_files_are_described_with_or_without_checksums(tmp_path: Path) -> None:
    pair = (np.zeros((4, 3, 2), "f4"), np.zeros(4, "i8"))
    write_arrays(tmp_path / "x.h5", train=pair, validation=pair)
    found = describe(tmp_path / "x.h5")
    assert [(d["shape"], d["dtype"], d["crc32"]) for d in found["datasets"]] == [
        ([4, 3, 2], "float32", "ok"),
        ([4], "int64", "ok"),
    ] * 2
    assert "4 x 3 x 2" in render(found)
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        del file.attrs["format"], file["train/inputs"].attrs["crc32"]
    assert describe(tmp_path / "x.h5")["datasets"][0]["crc32"] == "none"


def test_one_flipped_bit_is_detected(packed: Path) -> None:
    with h5py.File(packed) as file:
        offset = file["train/tokens"].id.get_offset()
    content = bytearray(packed.read_bytes())
    content[offset + 100] ^= 1
    packed.write_bytes(content)
    assert [dataset["crc32"] for dataset in describe(packed)["datasets"]] == ["damaged", "ok"]


def test_many_sources_are_shortened_in_the_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("once upon a time")
    files = [tmp_path / "book.txt"] * 5000  # more than an attribute could hold
    found = describe(pack(files, tmp_path / "x.h5").path)
    assert len(found["sources"]) == 5000
    assert "and 4992 more" in render(found)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["format"] = "hpctrain-checkpoint"
    with pytest.raises(DataError, match="has format 'hpctrain-checkpoint', expected 'hpctrain-tokens'"):
        describe(tmp_path / "x.h5")
