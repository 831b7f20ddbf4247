"""Bounded reading: only regular files, at most the allowed size, and without waiting."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hpctrain.util import reading


@pytest.fixture(params=["pipe", "socket", "folder", "device"])
def odd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "device":
        return "/dev/zero"
    monkeypatch.chdir(tmp_path)  # the name of a socket has at most 107 bytes
    if request.param == "pipe":
        os.mkfifo("odd")
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("odd")
    else:
        Path("odd").mkdir()
    return "odd"


@pytest.mark.limit(5)
def test_a_path_that_is_not_a_regular_file_is_an_error(odd: str) -> None:
    with pytest.raises(OSError, match="it is not a regular file|Is a directory"):
        reading.read_bytes(odd)


def test_a_file_larger_than_allowed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert reading.read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        reading.read_bytes(path, 4)
    os.truncate(path, 2**40)
    with pytest.raises(OSError, match="more than"):
        reading.read_bytes(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"\xff", "UTF-8"), (b"[" * 100_000, "deeply"), (b"9" * 5_000, "digits"), (b"{", "not JSON")],
)
def test_invalid_json_is_an_error(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=reason):
        reading.read_json(tmp_path / "x")
