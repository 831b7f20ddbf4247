"""Settings of the C library's malloc, from which torch allocates CPU tensors."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


VARIABLE = "HPCTRAIN_MALLOC"
UPDATES = 2  # updates after which all permanent tensors have been allocated
LOW, HIGH = 2**17, 2**25  # bytes: the threshold at first and later; glibc allows at most 32 MiB
TRIM_THRESHOLD = 2**30  # free bytes at the top of the heap that are kept before memory is returned
# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TUNED_BY_USERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


class Allocator:
    """Control of the process's malloc; ``libc`` is None if malloc must not be changed."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc
        self._handle: Any = None
        self._updates = 0
        self._raised = libc is None

    def start(self) -> None:
        """Use mmap for large allocations until the optimizer has made its first updates."""
        if self._raised or self._handle is not None:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._set(LOW)
        self._handle = register_optimizer_step_post_hook(self._count)

    def raise_threshold(self) -> None:
        """Allocate from the shared heap from now on; return its free memory to the system."""
        if self._raised:
            return
        self._raised = True
        self._set(HIGH)
        self._libc.malloc_trim(0)

    def _count(self, *_: Any) -> None:
        self._updates += 1  # torch is iterating over its hooks, so this hook cannot be removed here
        if self._updates == UPDATES:
            self.raise_threshold()

    def _set(self, threshold: int) -> None:
        self._libc.mallopt(_M_MMAP_THRESHOLD, threshold)
        self._libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)


def library(environ: Mapping[str, str] = os.environ) -> Any:
    """Return glibc, or None if another C library or allocator is used, or the user tuned or disabled this."""
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
