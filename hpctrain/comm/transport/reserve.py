"""Reservation of memory that the ranks of a node share; space in /dev/shm is checked first.

MPI libraries create files there and map them. tmpfs allocates a page when it is first touched; if
no page is left, the process dies of SIGBUS. Containers have 64 MiB by default. Therefore the space
is checked before each window is created. Each rank then populates all pages of its part by a system
call that returns an error instead.

Where MPI reports dead ranks, no windows of MPI are used. A rank that dies while a window is created
could leave the others in MPI without end: Open MPI uses a communicator of its own for that, which the
others cannot revoke. Here, every wait is on a communicator of the caller.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from hpctrain.cluster.resources import ENLARGE, FOLDER, free_bytes
from hpctrain.comm.transport.failures import RANK_FAILURES, register, verify
from hpctrain.errors import CommunicationError
from hpctrain.util import atomic

SLACK = 2**20  # bytes that an MPI library may need for itself per window
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class NoSpaceError(CommunicationError):
    """Too little shared memory for a request; raised on all ranks that made the request."""


def missing_space(nbytes: int) -> NoSpaceError | None:
    """Return the error of a request for more memory than /dev/shm has left; None if there is enough."""
    free = free_bytes()
    if free is None or free >= nbytes + SLACK:
        return None
    wanted = (nbytes + SLACK) / 2**20
    left = f"{FOLDER} has {free / 2**20:,.1f} MiB left, {wanted:,.1f} MiB of node memory are needed"
    return NoSpaceError(f"{left}; {ENLARGE}")


def node_of(world: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks that share memory with this one."""
    node = world.Split_type(MPI.COMM_TYPE_SHARED, world.rank)
    assert isinstance(node, MPI.Intracomm), "ranks of one world make no intercommunicator"
    register(node)
    return node


# Memory without windows of MPI ---------------------------------------------------------------------------------------

ORDERED = ("x86_64", "AMD64")  # processors on which other cores see stores in program order


def shares_files() -> bool:
    """Return whether memory is shared by ``SharedBytes``: only where MPI reports dead ranks, and needs no fence."""
    return bool(RANK_FAILURES) and platform.machine() in ORDERED


class SharedBytes:
    """Memory to which every rank contributes ``nbytes``; has the methods of ``MPI.Win`` that node memory uses.

    The first rank makes a file without a name, which the others open through its process. Construction is
    collective over ``node``. Raises ``OSError`` if this rank cannot map the file.
    """

    def __init__(self, node: MPI.Intracomm, nbytes: int) -> None:
        sizes = np.empty(node.size, np.int64)
        node.Allgather(np.array([nbytes], np.int64), sizes)
        verify(node)
        self._ends = np.cumsum(sizes).tolist()
        self._begins = [0, *self._ends[:-1]]
        file = _anonymous(self._ends[-1]) if node.rank == 0 else -1
        self._memory: mmap.mmap | None = None
        try:
            place = np.array([os.getpid(), file], np.int64)
            node.Bcast(place, 0)
            verify(node)
            with suppress(OSError):
                if node.rank and place[1] >= 0:
                    file = os.open("/proc/{}/fd/{}".format(*place.tolist()), os.O_RDWR)
                self._memory = mmap.mmap(file, max(self._ends[-1], 1)) if file >= 0 else None
            node.Barrier()  # the first rank keeps its file open until the others have opened it
            verify(node)
        finally:
            if file >= 0:
                os.close(file)
        if self._memory is None:
            raise OSError("cannot map memory of the first rank of this node")

    def Shared_query(self, rank: int) -> tuple[Any, int]:  # noqa: N802
        """Return the part of a rank, and the size of its elements in bytes."""
        memory = MPI.buffer.frombuffer(self._memory)
        return memory[self._begins[rank] : self._ends[rank]], 1

    def Free(self) -> None:  # noqa: N802
        """Give up the memory; it is unmapped when no tensor in it is left."""
        self._memory = None


def _anonymous(nbytes: int) -> int:
    """Return a descriptor of a file in memory without a name; -1 if there is no space for it."""
    file = -1
    try:
        file = os.memfd_create("hpctrain")
        os.ftruncate(file, max(nbytes, 1))
    except OSError:
        if file >= 0:
            os.close(file)
        return -1
    return file


# Reservation ----------------------------------------------------------------------------------------------------------

Window = MPI.Win | SharedBytes


def reserve_window(node: MPI.Intracomm, nbytes: int, agree: Callable[[bool], bool]) -> Window:
    """Return a window of ``nbytes`` for this rank, with all pages populated. Collective.

    ``agree`` is a logical AND over all ranks that must get memory together. Raises ``NoSpaceError``
    on all of them if one of them gets no memory.
    """
    total = node.allreduce(nbytes)
    missing = missing_space(total)
    if not agree(missing is None):
        raise missing or NoSpaceError(f"{FOLDER} of another node or rank has too little space left; {ENLARGE}")
    window: Window | None = None
    reason, makes = "", SharedBytes if shares_files() else _window
    try:
        window = makes(node, nbytes)
    except (MPI.Exception, OSError) as error:
        reason = str(error).splitlines()[0]
    if agree(window is not None and populate(window.Shared_query(node.rank)[0])):
        assert window is not None, "all ranks have a window"
        return window
    # All ranks of a window must free it together. If one rank has none, the window is left to MPI's
    # clean-up at exit.
    if node.allreduce(int(window is not None)) == node.size:
        assert window is not None, "all ranks of this node have a window"
        window.Free()
    why = reason or f"{FOLDER} has {(free_bytes() or 0) / 2**20:,.1f} MiB left"
    raise NoSpaceError(f"cannot get {total / 2**20:,.1f} MiB of node memory: {why}; {ENLARGE}")


def _window(node: MPI.Intracomm, nbytes: int) -> MPI.Win:
    return MPI.Win.Allocate_shared(nbytes, 1, comm=node)


def populate(memory: MPI.buffer) -> bool:
    """Populate all pages of mapped memory; return whether there was space for them.

    The pages are on the caller's NUMA node, as after a first touch. Before Linux 5.14 the space of
    the mapped file is reserved instead; if the file was unlinked, the check by ``free_bytes`` must
    suffice.
    """
    if not memory.nbytes:
        return True
    begin = memory.address // mmap.PAGESIZE * mmap.PAGESIZE
    length = memory.address + memory.nbytes - begin
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
        return True
    if ctypes.get_errno() == errno.EINVAL:
        return _reserve(begin, length)
    return ctypes.get_errno() not in (errno.EFAULT, errno.ENOMEM)


def _reserve(begin: int, length: int) -> bool:
    """Reserve the space in the file that is mapped at an address; return False if there is not enough."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        first, last = (int(number, 16) for number in fields[0].split("-"))
        if first <= begin < last:
            try:
                handle = atomic.reopen(fields[5] if len(fields) == 6 else "")
            except OSError:
                return True
            try:
                os.posix_fallocate(handle, int(fields[2], 16) + begin - first, min(length, last - begin))
            except OSError as error:
                return error.errno not in (errno.ENOSPC, errno.EDQUOT)
            finally:
                os.close(handle)
    return True
