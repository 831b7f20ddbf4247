"""Host memory for masters, gradients and states: pageable, pinned, or backed by files on a disk.

Note: cleanup. A file is unlinked as soon as it is mapped. Its space is therefore freed when the
process ends, however it ends. A file keeps its name only if its process is killed while creating
it. The next start of the same rank removes such a file, unless another job is creating it at that
moment and therefore holds its lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.util import atomic
from hpctrain.util.text import printable

MIB = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Disk:
    """Allocator of file-backed memory for one rank; a call returns ``nbytes`` zero bytes of a new file in a folder."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = Path(folder).expanduser()
        self._prefix = f"hpctrain-offload-rank{rank}-"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in sorted(self._folder.glob(f"{self._prefix}{socket.gethostname()}-*")):
                if not _remove_unless_locked(leftover):
                    logger.warning("%s belongs to another user: it is left there", printable(leftover))
        except OSError as error:
            raise self._error(error) from error

    def __call__(self, nbytes: int) -> Tensor:
        """Return memory of a new file; all its blocks are allocated, so that later writes cannot lack space."""
        path = self._folder / f"{self._prefix}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            if self._free_bytes() < nbytes:  # posix_fallocate would fill the disk before it fails
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            descriptor = atomic.create(path, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.posix_fallocate(descriptor, 0, nbytes)
                # mmap.mmap would keep a descriptor per file. Open by descriptor: the name may
                # belong to another file by now.
                return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
            finally:
                path.unlink()
                os.close(descriptor)
        except OSError as error:
            raise self._error(error, nbytes) from error

    def _free_bytes(self) -> int:
        system = os.statvfs(self._folder)
        return system.f_bavail * system.f_frsize

    def _error(self, error: OSError, nbytes: int = 0) -> UsageError:
        what = f"setting offload.disk = {self._folder}"
        if error.errno not in _FULL:
            return UsageError(f"{what}: {error.strerror}: must be a folder in which every rank can create files")
        free = self._free_bytes()
        missing = f"{max(nbytes - free, 0) / MIB:.0f} MiB are missing" if free < nbytes else "a quota allows no more"
        return UsageError(f"{what}: {nbytes / MIB:.0f} MiB more are needed, {free / MIB:.0f} MiB are free: {missing}")


def _remove_unless_locked(path: Path) -> bool:
    """Remove a file that a process of this user left behind; return False if it is not this user's regular file."""
    try:
        if os.lstat(path).st_uid != os.geteuid():
            return False
        descriptor = atomic.reopen(path)
    except FileNotFoundError:
        return True  # its process has just removed it
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
    return True


# Host memory for masters, gradients and states: pageable, pinned, or file-backed --------------------------------------
#
# Note: pinned memory and files are allocated in chunks that are divided into tensors. Torch rounds
# pinned allocations up to powers of two, which would double the memory of many tensors; and a file is
# extended and mapped one chunk at a time. Pageable memory is allocated per tensor, because a partly
# filled chunk would cost a rank up to 64 MiB. Pageable and pinned memory is written at once by the
# rank that allocates it. Therefore it is placed on the rank's NUMA node, and a lack of memory shows
# at the start.


CHUNK = 64 * 2**20
_LINE = 64  # bytes; tensors begin at cache lines


class HostMemory:
    """Allocator of host memory for data of a device; settings and device determine the kind of memory.

    ``pin`` allocates pinned bytes. Raises ``UsageError`` if the folder ``offload.disk`` cannot hold the files.
    """

    def __init__(
        self,
        settings: OffloadSettings,
        device: torch.device,
        rank: int,
        chunk: int = CHUNK,
        pin: Callable[[int], Tensor] = partial(torch.empty, dtype=torch.uint8, pin_memory=True),
    ) -> None:
        self._allocate: Callable[[int], Tensor] = partial(_pinned, pin=pin) if device.type == "cuda" else _pageable
        if settings.disk:
            self._allocate = Disk(settings.disk, rank)
        self._chunk = 0 if self._allocate is _pageable else chunk
        self._unused = torch.empty(0, dtype=torch.uint8)
        self.nbytes = 0  # allocated from the system

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for ``numel`` elements."""
        nbytes = numel * dtype.itemsize
        taken = -(-nbytes // _LINE) * _LINE
        if taken > self._unused.numel():
            if not self._chunk:  # reserved memory is kept for other tensors
                return self._allocate_bytes(taken)[:nbytes].view(dtype)
            self.reserve(taken)
        memory, self._unused = self._unused[:nbytes], self._unused[taken:]
        return memory.view(dtype)

    def reserve(self, nbytes: int) -> None:
        """Allocate at least ``nbytes`` of contiguous memory from the system now, unless that much is left."""
        if nbytes > self._unused.numel():
            self._unused = self._allocate_bytes(max(nbytes, self._chunk))

    def _allocate_bytes(self, nbytes: int) -> Tensor:
        taken = self._allocate(nbytes)
        self.nbytes += taken.numel()
        return taken


def _pageable(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8).zero_()


def _pinned(nbytes: int, pin: Callable[[int], Tensor]) -> Tensor:
    """Return pinned memory, of the size that torch rounds up to; pageable memory if pinning fails."""
    rounded = 1 << (nbytes - 1).bit_length()
    try:
        return pin(rounded).zero_()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        _warn_once("offload: no more pinned memory (%s): copies from and to the device will be slower", reason)
        return _pageable(nbytes)


_warn_once = cache(logger.warning)


# Optimizer states in such memory --------------------------------------------------------------------------------------


class PlacedStates:
    """States of optimizers in memory that ``allocate`` allocates for a number of elements.

    Values are unchanged. Only states with the parameter's shape are moved; others (step counts) stay
    where they are. Each state gets its memory once. The tensors that ``load_state_dict`` assigns are
    copied there after the next update.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype], Tensor]) -> None:
        self._allocate = allocate
        self._memory: dict[tuple[torch.optim.Optimizer, nn.Parameter, str], Tensor] = {}

    def place(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Move states of some parameters that were created or replaced since the last call."""
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.numel():
                    continue
                memory = self._memory.get((optimizer, parameter, name))
                if memory is None or memory.dtype is not value.dtype or memory.shape != value.shape:
                    memory = self._allocate(value.numel(), value.dtype).view_as(value)
                    self._memory[optimizer, parameter, name] = memory
                if value.data_ptr() != memory.data_ptr():
                    state[name] = memory.copy_(value)
