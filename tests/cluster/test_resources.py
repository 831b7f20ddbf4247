"""Resources of a rank: CPUs, threads, free memory, and shared memory that dead jobs left."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cluster.resources import (
    Binding,
    cpu_affinity,
    format_cpus,
    free_bytes,
    free_memory,
    left_over,
    remove_left_over,
    table,
    threads_for,
)


def test_affinity_is_that_of_the_system() -> None:
    assert list(cpu_affinity()) == sorted(os.sched_getaffinity(0))


def test_affinity_follows_taskset() -> None:
    first, *_ = cpu_affinity()
    code = f"import os; os.sched_setaffinity(0, [{first}]); from hpctrain.cluster import resources as b; "
    code += "print(b.cpu_affinity())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"({first},)"


@pytest.mark.parametrize(
    "cpus, text",
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1, 2, 7), "0-2,7"),
        ((7, 1, 0, 2), "0-2,7"),
        ((1, 3, 5), "1,3,5"),
        (tuple(range(128)), "0-127"),
    ],
)
def test_format_cpus_joins_ranges(cpus: tuple[int, ...], text: str) -> None:
    assert format_cpus(cpus) == text


NODE = tuple(range(8))


@pytest.mark.parametrize(
    "mine, everyone, threads",
    [
        (NODE, [NODE], 8),
        (NODE, [NODE] * 4, 2),
        (NODE, [NODE] * 3, 2),
        (NODE, [NODE] * 16, 1),
        (NODE[:4], [NODE[:4], NODE[4:]], 4),
        (NODE[:2], [NODE[:2], NODE[2:]], 2),
        (NODE[:4], [NODE[:4]] * 2 + [NODE[4:]] * 2, 2),
        (NODE, [NODE, NODE[:4]], 6),
        (NODE[:4], [NODE, NODE[:4]], 2),
    ],
    ids=["alone", "shared", "uneven", "crowded", "bound", "unequal", "sockets", "half of mine", "all shared"],
)
def test_threads_per_rank_share_the_cpus(mine: tuple[int, ...], everyone: list[tuple[int, ...]], threads: int) -> None:
    assert threads_for(mine, everyone) == threads


def test_threads_do_not_outnumber_the_cpus() -> None:
    chance = random.Random(1)
    for _ in range(200):
        masks = [tuple(chance.sample(range(16), chance.randint(1, 16))) for _ in range(chance.randint(1, 6))]
        threads = [threads_for(mask, masks) for mask in masks]
        assert all(1 <= count <= len(mask) for count, mask in zip(threads, masks))
        assert sum(count for count in threads if count > 1) <= len(set().union(*masks))


def test_table_is_aligned() -> None:
    rows = [Binding("n1", 0, 0, (0, 1), 2, "cpu"), Binding("node12", 10, 1, (2, 3, 9), 3, "cuda:1 (H200)")]
    assert table(rows).splitlines() == [
        "host    rank  local rank  cpus   threads  device",
        "n1         0           0  0-1          2  cpu",
        "node12    10           1  2-3,9        3  cuda:1 (H200)",
    ]


# Memory ---------------------------------------------------------------------------------------------------------------


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
