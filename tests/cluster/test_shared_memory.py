"""Shared memory left by dead jobs: it is found, and other files are not."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from hpctrain.cluster.resources import free_bytes, free_memory, left_over, remove_left_over


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


@pytest.mark.parametrize(
    "files, free",
    [
        ({}, 3000 * 1024),
        ({"memory.max": "max", "memory.current": "5"}, 3000 * 1024),
        ({"memory.max": "1000000", "memory.current": "400000"}, 600_000),
        ({"memory.max": "1000", "memory.current": "2000"}, 0),
        ({"memory/memory.limit_in_bytes": "900000", "memory/memory.usage_in_bytes": "100000"}, 800_000),
    ],
)
def test_free_memory_is_within_the_limit_of_the_cgroup(tmp_path: Path, files: dict[str, str], free: int) -> None:
    files = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 3000 kB\n"} | {
        f"sys/fs/cgroup/{name}": text for name, text in files.items()
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == free


def test_free_memory_that_is_not_reported_is_half_of_all(tmp_path: Path) -> None:
    assert free_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
