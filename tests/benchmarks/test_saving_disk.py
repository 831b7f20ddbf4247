"""Plain writes and reads, the reference of all other measurements."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from saving import disk


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 100])
def test_written_bytes_are_read_back_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(disk, "PIECE", 16)
    data, path = os.urandom(nbytes), tmp_path / "file"
    disk.write_at(path, memoryview(data))
    assert path.read_bytes() == data
    found = bytearray(nbytes)
    disk.read_at(path, memoryview(found))
    assert found == data


def test_two_ranks_write_their_shares_of_one_file(tmp_path: Path) -> None:
    path, found = tmp_path / "file", bytearray(4)
    disk.write_at(path, memoryview(b"5678"), 4)
    disk.write_at(path, memoryview(b"1234"), 0)
    assert path.read_bytes() == b"12345678"
    disk.read_at(path, memoryview(found), 2)
    assert found == b"3456"


def test_a_write_ends_after_the_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (real(handle), flushed.append(os.fstat(handle).st_size)))
    disk.write_at(tmp_path / "file", memoryview(b"1234"))
    disk.flush(tmp_path / "file")
    assert flushed == [4, 4]


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"123")
    with pytest.raises(EOFError, match="ends 2 bytes too early"):
        disk.read_at(path, memoryview(bytearray(5)))


def test_files_and_folders_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "file").write_bytes(b"123")
    disk.delete(tmp_path / "folder")
    disk.delete(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_the_filesystem_has_a_name() -> None:
    assert disk.filesystem_of(Path("/proc")) == "proc"
    assert disk.filesystem_of(Path(__file__).parent) not in ("", "proc", "unknown")
