"""Space in /dev/shm for node-shared memory: checked before allocation, and reserved immediately.

MPI libraries create files there and map them. tmpfs allocates a page when it is first touched; if
no page is left, the process dies of SIGBUS. Containers have 64 MiB by default. Therefore the space
is checked before each window is created. Each rank then populates all pages of its part by a system
call that returns an error instead.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from mpi4py import MPI

from hpctrain.cluster.shared_memory import ENLARGE, FOLDER, free_bytes
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


def window(node: MPI.Intracomm, nbytes: int, agree: Callable[[bool], bool]) -> MPI.Win:
    """Return a window of ``nbytes`` for this rank, with all pages populated. Collective.

    ``agree`` is a logical AND over all ranks that must get memory together. Raises ``NoSpaceError``
    on all of them if one of them gets no memory.
    """
    total = node.allreduce(nbytes)
    missing = missing_space(total)
    if not agree(missing is None):
        raise missing or NoSpaceError(f"{FOLDER} of another node or rank has too little space left; {ENLARGE}")
    made, reason = None, ""
    try:
        made = MPI.Win.Allocate_shared(nbytes, 1, comm=node)
    except MPI.Exception as error:
        reason = str(error).splitlines()[0]
    if agree(made is not None and populate(made.Shared_query(node.rank)[0])):
        assert made is not None, "all ranks have a window"
        return made
    # All ranks of a window must free it together. If one rank has none, the window is left to MPI's
    # clean-up at exit.
    if node.allreduce(int(made is not None)) == node.size:
        assert made is not None, "all ranks of this node have a window"
        made.Free()
    why = reason or f"{FOLDER} has {(free_bytes() or 0) / 2**20:,.1f} MiB left"
    raise NoSpaceError(f"cannot get {total / 2**20:,.1f} MiB of node memory: {why}; {ENLARGE}")


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
