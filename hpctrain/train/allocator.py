"""Settings of the C library's malloc, which torch takes the memory of tensors on the CPU from.

By default glibc raises the size from which an allocation gets pages of its own (mmap) up to 32 MiB as such memory is
freed. From then on tensors that live for the whole run and those of a single layer lie in one heap, between each
other: memory that is free there is neither used nor given back. If all large tensors had pages of their own, each
allocation would have them zeroed anew: a ResNet's step takes 1.8 times as long at a threshold of 1 MiB, 1.4 times at 4
MiB (benchmarks/README.md).

So the threshold is low while a run allocates what stays: parameters, buckets, the optimizer's states. After the second
update it is high: tensors that come and go share a heap that holds little else, and its pages stay.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from typing import Any

VARIABLE = "HPCTRAIN_MALLOC"
UPDATES = 2  # after which all that stays has been allocated
LOW, HIGH = 2**17, 2**25  # bytes: the threshold at first and afterwards; glibc allows no more than 32 MiB
KEPT = 2**30  # bytes that may be free at the top of the heap before they are given back
# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TUNED_BY_USERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


class Allocator:
    """The process's malloc; ``libc`` is None where it is left alone."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc
        self._handle: Any = None
        self._updates = 0
        self._settled = libc is None

    def start(self) -> None:
        """Give large allocations pages of their own, until the optimizer has made its first updates."""
        if self._settled or self._handle is not None:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._set(LOW)
        self._handle = register_optimizer_step_post_hook(self._count)

    def settle(self) -> None:
        """Let allocations share the heap from now on; give back what is free in it."""
        if self._settled:
            return
        self._settled = True
        self._set(HIGH)
        self._libc.malloc_trim(0)

    def _count(self, *_: Any) -> None:
        self._updates += 1  # torch iterates over its hooks: this one cannot be removed here
        if self._updates == UPDATES:
            self.settle()

    def _set(self, threshold: int) -> None:
        self._libc.mallopt(_M_MMAP_THRESHOLD, threshold)
        self._libc.mallopt(_M_TRIM_THRESHOLD, KEPT)


def library(environ: Mapping[str, str] = os.environ) -> Any:
    """Return glibc, or None: there is another C library or allocator, or the user has set it or switched this off."""
    tuned = [name for name in _TUNED_BY_USERS if name in environ]
    if environ.get(VARIABLE, "1") == "0" or tuned or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return None
    if "malloc" in environ.get("LD_PRELOAD", "") or platform.libc_ver()[0] != "glibc":
        return None
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None


ALLOCATOR = Allocator(library())
