"""Snapshot of a rank's share in memory that it shares with its writer process, so that training can continue.

The memory is an anonymous file (``memfd_create``). Only the rank and its writer process can access
it. It is reused for all checkpoints, and is freed when both processes end.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from hpctrain.checkpoint.file.layout import Array
from hpctrain.checkpoint.file.source import Source
from hpctrain.checkpoint.tensors import copy_flat
from hpctrain.checkpoint.together.plan import Part
from hpctrain.errors import CheckpointError
from hpctrain.log import logger

_BORDER = 64  # bytes: alignment of each part, sufficient for any element type


class Copied(NamedTuple):
    """A byte range of a dataset in the snapshot: offset in the dataset, offset in the memory, length."""

    name: str
    to: int
    at: int
    nbytes: int


class Snapshot:
    """Memory shared with another process; it grows to the size of the largest checkpoint."""

    def __init__(self) -> None:
        self.handle = os.memfd_create("hpctrain-checkpoint")
        self._memory: mmap.mmap | None = None
        self._bytes: Array = np.empty(0, dtype=np.uint8)
        self._pinned = self._may_pin = False

    @property
    def nbytes(self) -> int:
        """Return the size of the memory in bytes."""
        return self._bytes.nbytes

    def take(self, sources: Sequence[Source], parts: Sequence[Part]) -> list[Copied]:
        """Copy parts of sources; return the location of each of their byte ranges."""
        sizes = [(part.end - part.begin) * sources[part.box].itemsize for part in parts]
        self._reserve(sum(-(-size // _BORDER) * _BORDER for size in sizes), sources)
        found, at = [], 0
        for part, size in zip(parts, sizes):
            source = sources[part.box]
            _copy(source, part, self._bytes[at : at + size])
            for to, offset, nbytes in source.stretches(part.begin, part.end):
                found.append(Copied(source.path, to, at + offset, nbytes))
            at += -(-size // _BORDER) * _BORDER
        return found

    def close(self) -> None:
        """Free the memory."""
        self._unmap()
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1

    def _reserve(self, nbytes: int, sources: Sequence[Source]) -> None:
        if nbytes > self.nbytes:
            self._unmap()
            try:
                os.ftruncate(self.handle, nbytes)
                self._memory = mmap.mmap(self.handle, nbytes)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot get {nbytes} bytes of memory for a checkpoint: {error}") from error
            with suppress(AttributeError, OSError):  # no huge pages on this system
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._may_pin = True
            self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        if self._may_pin and any(getattr(source.box.tensor, "is_cuda", False) for source in sources):
            self._pin()

    def _pin(self) -> None:
        """Pin the memory for direct copies from the GPU; without pinning, copies are slower and equally correct."""
        self._may_pin = False
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        outcome = int(runtime.cudaHostRegister(self._bytes.ctypes.data, self.nbytes, 0))
        self._pinned = outcome == 0
        if outcome:
            logger.warning("memory for checkpoints cannot be pinned (CUDA error %d): copies take longer", outcome)

    def _unmap(self) -> None:
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._bytes.ctypes.data)
            self._pinned = False
        self._bytes = np.empty(0, dtype=np.uint8)
        if self._memory is not None:
            with suppress(BufferError):  # an error in progress may have views of it, which are freed with the error
                self._memory.close()
            self._memory = None


def _copy(source: Source, part: Part, out: Array) -> None:
    tensor = source.box.tensor
    if isinstance(tensor, torch.Tensor):
        copy_flat(tensor, part.begin, part.end, out)
    else:
        out[:] = np.frombuffer(source.bytes(part.begin, part.end), dtype=np.uint8)
