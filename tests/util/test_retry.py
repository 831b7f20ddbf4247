"""Errors of files that cannot be written: the file, the reason, the free bytes, and the exit code."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpctrain.errors import DataError, FileSystemError, HpctrainError, UsageError
from hpctrain.util.retry import writing


@pytest.mark.parametrize(
    "number, kind, said",
    [
        (errno.ENOSPC, FileSystemError, r"no space left on device, \d+ bytes are free in {}; calls were repeated for"),
        (errno.EDQUOT, FileSystemError, r"disk quota exceeded, \d+ bytes are free in {}; calls were repeated for"),
        (errno.EIO, FileSystemError, "input/output error; calls were repeated for"),
        (errno.EFBIG, UsageError, r"file too large, \d+ bytes are free in {}$"),
        (errno.EISDIR, UsageError, "is a directory$"),
    ],
)
def test_the_error_names_the_file_and_the_reason(
    tmp_path: Path, number: int, kind: type[HpctrainError], said: str
) -> None:
    path = tmp_path / "missing" / "run.json"
    with pytest.raises(kind, match=f"^cannot write {path}: {said.format(tmp_path)}"), writing(path):
        raise OSError(number, os.strerror(number))


def test_errors_of_ours_are_not_changed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="^x$"), writing(tmp_path):
        raise DataError("x")
