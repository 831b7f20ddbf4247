"""Shared memory left by dead jobs: it is found, and other files are not."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from hpctrain.cluster.shared_memory import free_bytes, left_over, remove_left_over


def _segment(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(bytes(2 * mmap.PAGESIZE))
    return path


def test_free_bytes_are_those_of_the_filesystem(tmp_path: Path) -> None:
    assert free_bytes(str(tmp_path)) == os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert free_bytes(str(tmp_path / "none")) is None


def test_segments_that_no_process_has_mapped_are_removed(tmp_path: Path) -> None:
    dead, used, other = (_segment(tmp_path, name) for name in ("mpich_shm_1", "mpich_shm_2", "sem.mine"))
    (tmp_path / "mpich_shm_3").symlink_to(other)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert [one.path for one in left_over(str(tmp_path), age=-1)] == [str(dead)]
        assert left_over(str(tmp_path)) == []  # a starting job may be about to map it
        assert [(one.path, one.nbytes) for one in remove_left_over(str(tmp_path), age=-1)] == [(str(dead), 8192)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mpich_shm_2", "mpich_shm_3", "sem.mine"]
    assert left_over(str(tmp_path / "none")) == []
