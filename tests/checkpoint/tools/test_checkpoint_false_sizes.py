"""Small files that claim large sizes: every verb refuses them quickly and with little memory."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from support.checksums import lookup3

from hpctrain.checkpoint.tools import inspect, safetensors
from hpctrain.checkpoint.tools.convert import ingest
from hpctrain.cli.main import main
from hpctrain.errors import CheckpointError


def grown(path: Path, size: int) -> None:
    """Write a size into a checkpoint's superblock, with a valid checksum."""
    data = bytearray(path.read_bytes())
    data[28:36] = struct.pack("<Q", size)
    struct.pack_into("<I", data, 44, lookup3(bytes(data[:44])))
    path.write_bytes(data)
    os.truncate(path, size)


@pytest.mark.limit(20)
def test_a_sparse_checkpoint_is_listed_at_once(small_file: Path) -> None:
    grown(small_file, 1 << 43)
    (entry,) = inspect.ls(small_file.parent)
    assert entry.error is not None and "is damaged" in entry.error


@pytest.mark.limit(20)
def test_a_checkpoint_that_claims_more_bytes_than_it_stores_is_refused(small_file: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("needs a filesystem for files of 2^62 bytes: /dev/shm")
    path = Path("/dev/shm") / f"hpctrain-test-{os.getpid()}.h5"
    try:
        path.write_bytes(small_file.read_bytes())
        grown(path, 1 << 62)
        assert "claims 4611686018427387904 bytes and stores" in (inspect.verify(path).error or "")
    finally:
        path.unlink()


def test_an_expanded_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(1 << 20, 1 << 10)}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 4096
    with pytest.raises(CheckpointError, match=r"'w' of shape \(1048576, 1024\) repeats the same elements"):
        ingest(tmp_path / "x.pt", tmp_path / "x.h5")


def test_many_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    whole = torch.zeros(1 << 18)
    torch.save({f"w{number}": whole for number in range(100)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="repeats the same elements"):
        ingest(tmp_path / "x.pt", tmp_path / "x.h5")
    torch.save({f"w{number}": whole for number in range(12)}, tmp_path / "tied.pt")
    assert len(ingest(tmp_path / "tied.pt", tmp_path / "x.h5")) == 12


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    plain = io.BytesIO()
    torch.save({"w": torch.zeros(1 << 20)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    with pytest.raises(CheckpointError, match="x.pt is compressed"):
        ingest(tmp_path / "x.pt", tmp_path / "x.h5")


def test_a_safetensors_header_of_36_mb_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"__metadata__": {"x": "y" * (36 << 20)}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match=f"has a header of {len(text)} bytes; allowed are 16777216"):
        safetensors.read_header(tmp_path / "x.safetensors")


def test_a_file_truncated_between_header_and_data_is_an_error(tmp_path: Path) -> None:
    import numpy as np

    with open(tmp_path / "x.safetensors", "wb") as file:
        safetensors.write(file, [("w", (4096,), "float32")], [[np.ones(4096, "<f4")]], {})
    (tensor,), _ = safetensors.read_header(tmp_path / "x.safetensors")
    assert safetensors.load(tmp_path / "x.safetensors", tensor, 4090, 4096).tolist() == [1.0] * 6
    os.truncate(tmp_path / "x.safetensors", 4096)
    with pytest.raises(CheckpointError, match="was truncated meanwhile: 'w' ends"):
        safetensors.load(tmp_path / "x.safetensors", tensor, 0, 4096)


@pytest.mark.limit(10)
def test_a_pipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x.pt", "x.safetensors"):
        os.mkfifo(tmp_path / name)
        assert main(["checkpoint", "import", str(tmp_path / name), "-o", str(tmp_path / "x.h5")]) == 2
        assert "it is not a regular file" in capsys.readouterr().err
