"""Writing of data files: a file appears complete or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

from hpctrain.data.pack import _Sink, new_file
from hpctrain.errors import DataError


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "made" / "for" / "it.h5"
    with new_file(out, "kind", 3) as file:
        file["x"] = [1, 2, 3]
        assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["it.h5"]
    with h5py.File(out) as file:
        assert (file.attrs["format"], file.attrs["format_version"]) == ("kind", 3)
        assert file["x"][()].tolist() == [1, 2, 3]


@pytest.mark.parametrize("failure", [RuntimeError("flush failed"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("place", ["body", "fsync", "rename"])
def test_an_error_leaves_only_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, failure: Exception
) -> None:
    out = tmp_path / "it.h5"
    out.write_text("old")

    def fail(*args: object) -> None:
        raise failure

    if place != "body":
        monkeypatch.setattr(os, place, fail)
    with pytest.raises(DataError, match="cannot write .*it.h5: (No space left on device|flush failed)"):
        with new_file(out, "kind", 1):
            if place == "body":
                fail()
    assert [path.name for path in tmp_path.iterdir()] == ["it.h5"]
    assert out.read_text() == "old"


def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with new_file(tmp_path / "it.h5", "kind", 1):
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


_FULL = """
import resource, sys
import numpy as np
from pathlib import Path
from hpctrain.data.pack import _Sink, new_file
from hpctrain.errors import DataError

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    with new_file(Path(sys.argv[1]), "kind", 1) as file:
        file["x"] = np.ones(int(sys.argv[2]), "u1")
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("size, room", [(10, 10), (1 << 15, 3000), (1 << 15, 8192), (1 << 22, 1 << 20)])
def test_a_full_disk_leaves_no_file_and_the_process_continues(tmp_path: Path, size: int, room: int) -> None:
    command = [sys.executable, "-c", _FULL, str(tmp_path / "it.h5"), str(size), str(room)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"cannot write {tmp_path / 'it.h5'}: File too large\n", done.stderr
    assert done.returncode == 0 and not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot write .*: it is a folder"):
        with new_file(tmp_path, "kind", 1):
            pass
    with pytest.raises(DataError, match="cannot write .*it.h5: "):
        with new_file(tmp_path / "file" / "it.h5", "kind", 1):
            pass


def test_bytes_that_could_not_be_written_read_as_zeros(tmp_path: Path) -> None:
    with _Sink(tmp_path / "x", "w+") as sink:
        sink.write(b"abc")
        sink.failure = OSError("full")
        assert sink.write(b"def") == 3
        sink.seek(0)
        chance = bytearray(b"\xff" * 8)
        assert sink.readinto(chance) == 8 and chance == b"abc" + bytes(5)
