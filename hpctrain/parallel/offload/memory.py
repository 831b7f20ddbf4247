"""Host memory for masters, gradients and states: pageable, pinned, or file-backed.

Note: pinned memory and files are allocated in chunks that are divided into tensors. Torch rounds
pinned allocations up to powers of two, which would double the memory of many tensors; and a file is
extended and mapped one chunk at a time. Pageable memory is allocated per tensor, because a partly
filled chunk would cost a rank up to 64 MiB. Pageable and pinned memory is written at once by the
rank that allocates it. Therefore it is placed on the rank's NUMA node, and a lack of memory shows
at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from hpctrain.log import logger
from hpctrain.parallel.offload.disk import Disk
from hpctrain.parallel.offload.settings import OffloadSettings

CHUNK = 64 * 2**20
_LINE = 64  # bytes; tensors begin at cache lines


class HostMemory:
    """Allocator of host memory for data of a device; settings and device determine the kind of memory.

    Raises ``UsageError`` if the folder ``offload.disk`` cannot hold the files.
    """

    def __init__(self, settings: OffloadSettings, device: torch.device, rank: int, chunk: int = CHUNK) -> None:
        self._allocate: Callable[[int], Tensor] = _pinned if device.type == "cuda" else _plain
        if settings.disk:
            self._allocate = Disk(settings.disk, rank)
        self._chunk = 0 if self._allocate is _plain else chunk
        self._left = torch.empty(0, dtype=torch.uint8)
        self.nbytes = 0  # allocated from the system

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for ``numel`` elements."""
        nbytes = numel * dtype.itemsize
        taken = -(-nbytes // _LINE) * _LINE
        if taken > self._left.numel():
            if not self._chunk:  # reserved memory is kept for other tensors
                return self._take(taken)[:nbytes].view(dtype)
            self.reserve(taken)
        memory, self._left = self._left[:nbytes], self._left[taken:]
        return memory.view(dtype)

    def reserve(self, nbytes: int) -> None:
        """Allocate at least ``nbytes`` of contiguous memory from the system now, unless that much is left."""
        if nbytes > self._left.numel():
            self._left = self._take(max(nbytes, self._chunk))

    def _take(self, nbytes: int) -> Tensor:
        taken = self._allocate(nbytes)
        self.nbytes += taken.numel()
        return taken


def _plain(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8).zero_()


def _pinned(nbytes: int) -> Tensor:
    """Return pinned memory, of the size that torch rounds up to; pageable memory if pinning fails."""
    whole = 1 << (nbytes - 1).bit_length()
    try:
        return torch.empty(whole, dtype=torch.uint8, pin_memory=True).zero_()
    except RuntimeError as error:
        _tell(str(error).splitlines()[0])
        return _plain(nbytes)


@cache
def _tell(why: str) -> None:
    """Log once why the allocation of pinned memory failed."""
    logger.warning("offload: no more pinned memory (%s): copies from and to the device will be slower", why)
