"""Output files appear complete or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest

from hpctrain.checkpoint.tools.convert import put_in_place
from hpctrain.errors import CheckpointError


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old")

    def write(out: BinaryIO) -> None:
        out.write(b"new")
        out.flush()
        assert target.read_bytes() == b"old"

    put_in_place(target, write)
    assert target.read_bytes() == b"new" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("x")])
def test_after_an_error_no_file_remains(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "x"
    target.write_bytes(b"old")

    def write(out: BinaryIO) -> None:
        out.write(b"half")
        raise error

    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match="No space left|x|^$"):
        put_in_place(target, write)
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]
