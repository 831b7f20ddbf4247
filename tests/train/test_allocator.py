"""malloc's thresholds: low during the allocations that stay, high afterwards, unchanged if users set them."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from hpctrain.train.process import HIGH, LOW, UPDATES, Allocator, library

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


class Recorded:
    """C library that records the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def mallopt(self, name: int, value: int) -> int:
        self.calls.append((name, value))
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.calls.append("trim")
        return 1


def thresholds(libc: Recorded) -> list[int]:
    return [call[1] for call in libc.calls if call != "trim" and call[0] == -3]


def test_the_threshold_rises_after_the_second_update() -> None:
    libc = Recorded()
    allocator = Allocator(libc)
    allocator.start()
    allocator.start()  # once
    assert thresholds(libc) == [LOW] and "trim" not in libc.calls
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for update in range(UPDATES + 2):
        assert thresholds(libc) == ([LOW] if update < UPDATES else [LOW, HIGH])
        parameter.grad = torch.ones(2)
        optimizer.step()
    assert thresholds(libc) == [LOW, HIGH] and libc.calls.count("trim") == 1


@GLIBC
@pytest.mark.parametrize(
    "environ, left_alone",
    [
        ({}, False),
        ({"HPCTRAIN_MALLOC": "1"}, False),
        ({"HPCTRAIN_MALLOC": "0"}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "1000000"}, True),
        ({"MALLOC_ARENA_MAX": "2"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"}, True),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=on"}, False),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, True),
    ],
)
def test_settings_of_the_user_are_respected(environ: dict[str, str], left_alone: bool) -> None:
    assert (library(environ) is None) is left_alone


def test_without_a_library_the_allocator_does_nothing() -> None:
    allocator = Allocator(None)
    allocator.start()
    allocator.raise_threshold()  # no call of a library


@GLIBC
def test_large_memory_is_returned_while_the_threshold_is_low() -> None:
    """Memory freed at the bottom of the heap stays with the process unless it was allocated by mmap."""
    code = (
        "import sys, torch; from hpctrain.train.process import Allocator, library\n"
        "lines = lambda: open('/proc/self/status').read().splitlines()\n"
        "field = lambda: next(int(line.split()[1]) for line in lines() if line.startswith('RssAnon'))\n"
        "if sys.argv[1] == 'low': Allocator(library({})).start()\n"
        "warm = torch.zeros(30 * 2**18); del warm  # raises glibc's own threshold to 30 MiB\n"
        "before = field(); kept = []\n"
        "for _ in range(8):\n"
        "    passing = torch.zeros(2**20); kept.append(torch.zeros(2**15)); passing.fill_(1); kept.append(passing)\n"
        "kept = kept[::2]; print((field() - before) / 1024)"
    )
    held = {
        how: float(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout)
        for how in ("low", "default")
    }
    assert held["low"] < 8 and held["default"] > 20  # MiB, of which 5 stay allocated


def test_the_library_has_mallopt() -> None:
    libc = library({})
    assert libc is None or libc.mallopt(ctypes.c_int(-3), ctypes.c_int(HIGH)) == 1
