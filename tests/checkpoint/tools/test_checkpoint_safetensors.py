"""The safetensors reader and writer, compared with the format's own library; malformed files are refused."""

from __future__ import annotations

import io
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import all_dtypes

from hpctrain.checkpoint.tools import safetensors
from hpctrain.errors import CheckpointError

HEAD = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def crafted(folder: Path, header: Any, data: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder / "x.safetensors"


def test_the_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    torch_side = pytest.importorskip("safetensors.torch")
    arrays = {**all_dtypes(), "empty": np.empty((0, 3), "<f4")}
    described = [(name, array.shape, "float32" if name == "empty" else name) for name, array in arrays.items()]
    path = tmp_path / "ours.safetensors"
    with open(path, "wb") as out:
        safetensors.write(out, described, ([array] for array in arrays.values()), {"step": "3", "text": "wörk\n"})
    theirs = torch_side.load_file(path)
    assert set(theirs) == set(arrays)
    for name, shape, dtype in described:
        assert (str(theirs[name].dtype), tuple(theirs[name].shape)) == (f"torch.{dtype}", shape)
        raw = theirs[name].contiguous().view(-1)
        assert not raw.numel() or raw.view(__import__("torch").uint8).numpy().tobytes() == arrays[name].tobytes()
    with library.safe_open(path, "np") as file:
        assert file.metadata() == {"step": "3", "text": "wörk\n"}


def test_our_reader_reads_files_of_the_safetensors_library(tmp_path: Path) -> None:
    numpy_side = pytest.importorskip("safetensors.numpy")
    arrays = {"a.b": np.arange(5, dtype="i2"), "c": np.ones((2, 2)), "none": np.empty((0, 2), "f4"), "s": np.array(3)}
    numpy_side.save_file(arrays, tmp_path / "theirs.safetensors", metadata={"k": "v"})
    tensors, metadata = safetensors.read_header(tmp_path / "theirs.safetensors")
    assert metadata == {"k": "v"} and {tensor.name for tensor in tensors} == set(arrays)
    for tensor in tensors:
        found = safetensors.load(tmp_path / "theirs.safetensors", tensor, 0, math.prod(tensor.shape))
        assert tensor.shape == arrays[tensor.name].shape and found.tobytes() == arrays[tensor.name].tobytes()


def test_data_begin_at_a_multiple_of_eight() -> None:
    for length in range(1, 10):
        out = io.BytesIO()
        safetensors.write(out, [("n" * length, (1,), "float64")], [[np.ones(1)]], {})
        assert (len(out.getvalue()) - 8) % 8 == 0


def test_a_name_reserved_by_the_format_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot hold a tensor of the name '__metadata__'"):
        safetensors.write(io.BytesIO(), [("__metadata__", (1,), "float64")], [[np.ones(1)]], {})


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[" * 100_000, "header of .* is not as"),
        (b'{"w": 1, "w": 2}', "a name occurs twice"),
        (b"\xff{}", "header of .* is not as"),
        ([], "header of .* is not as"),
        ({"w": {**HEAD["w"], "dtype": "F8_E4M3"}}, "has the dtype 'F8_E4M3'"),
        ({"w": {**HEAD["w"], "shape": [-2]}}, "has the shape"),
        ({"w": {**HEAD["w"], "shape": [True, 2]}}, "has the shape"),
        ({"w": {**HEAD["w"], "shape": [1 << 61, 1 << 61]}}, "has 8 bytes: expected"),
        ({"w": {**HEAD["w"], "data_offsets": [0, 1 << 60]}}, "expected 8"),
        ({"w": {**HEAD["w"], "data_offsets": [8, 16]}}, "does not begin where"),
        ({**HEAD, "v": HEAD["w"]}, "does not begin where"),
        ({}, "has 18 bytes, its tensors end at 10"),
        ({"w": {"dtype": "F32"}}, "header of .* is not as"),
        ({"__metadata__": 3, **HEAD}, "metadata|header of"),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        safetensors.read_header(crafted(tmp_path, header))


def test_truncated_and_foreign_files_are_refused(tmp_path: Path) -> None:
    good = crafted(tmp_path, HEAD).read_bytes()
    assert safetensors.read_header(tmp_path / "x.safetensors")[0][0].name == "w"
    for data in (b"", b"abc", struct.pack("<Q", 1 << 62), good[:-1], good + b"\0", bytes(100)):
        (tmp_path / "y").write_bytes(data)
        with pytest.raises(CheckpointError, match=str(tmp_path / "y")):
            safetensors.read_header(tmp_path / "y")
    with pytest.raises(CheckpointError, match="cannot read"):
        safetensors.read_header(tmp_path / "none")
