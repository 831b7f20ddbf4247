"""Give memory of the host for masters, gradients and states: plain, pinned, or a file's.

Note: pinned memory and files come in chunks, of which tensors are cut. torch rounds pinned memory up to powers of two,
which would double what many a tensor takes; and a file is extended and mapped a chunk at a time. Plain memory is taken
tensor by tensor: a chunk that is not filled would cost a rank up to 64 MiB. Plain and pinned memory is written to at
once, by the rank that asks for it: so it lies by its cores, and what is missing is missed at the start.
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
    """Give out memory for what this rank keeps for a device, of the kind that settings and device call for.

    Raises ``UsageError`` where the folder ``offload.disk`` cannot take the files.
    """

    def __init__(self, settings: OffloadSettings, device: torch.device, rank: int, chunk: int = CHUNK) -> None:
        self._allocate: Callable[[int], Tensor] = _pinned if device.type == "cuda" else _plain
        if settings.disk:
            self._allocate = Disk(settings.disk, rank)
        self._chunk = 0 if self._allocate is _plain else chunk
        self._left = torch.empty(0, dtype=torch.uint8)
        self.nbytes = 0  # taken from the system

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for so many elements; what it holds is not defined."""
        nbytes = numel * dtype.itemsize
        taken = -(-nbytes // _LINE) * _LINE
        if taken > self._left.numel():
            if not self._chunk:  # what is reserved stays for others
                return self._take(taken)[:nbytes].view(dtype)
            self.reserve(taken)
        memory, self._left = self._left[:nbytes], self._left[taken:]
        return memory.view(dtype)

    def reserve(self, nbytes: int) -> None:
        """Take memory for so many bytes more from the system now, in one piece."""
        if nbytes > self._left.numel():
            self._left = self._take(max(nbytes, self._chunk))

    def _take(self, nbytes: int) -> Tensor:
        taken = self._allocate(nbytes)
        self.nbytes += taken.numel()
        return taken


def _plain(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8).zero_()


def _pinned(nbytes: int) -> Tensor:
    """Return memory from which a GPU copies by itself, as much as torch takes anyway; plain where there is none."""
    whole = 1 << (nbytes - 1).bit_length()
    try:
        return torch.empty(whole, dtype=torch.uint8, pin_memory=True).zero_()
    except RuntimeError as error:
        _tell(str(error).splitlines()[0])
        return _plain(nbytes)


@cache
def _tell(why: str) -> None:
    """Say once what pinned memory failed of."""
    logger.warning("offload: no more pinned memory (%s): copies from and to the device will be slower", why)
