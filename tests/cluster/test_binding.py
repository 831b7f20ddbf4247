from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from hpctrain.cluster.resources import Binding, cpu_affinity, format_cpus, table, threads_for


def test_affinity_is_that_of_the_system() -> None:
    assert list(cpu_affinity()) == sorted(os.sched_getaffinity(0))


def test_affinity_follows_taskset() -> None:
    (first, *_) = cpu_affinity()
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
def test_threads_per_rank_share_the_cpus(
    mine: tuple[int, ...], everyone: list[tuple[int, ...]], threads: int
) -> None:
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
