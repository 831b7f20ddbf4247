"""Ranks that have died, as reported by MPI with fault tolerance (ULFM, ``mpiexec --with-ft ulfm`` of Open MPI).

With it, the launcher does not end the job when a rank dies, and operations with this rank return an
error in the others. Operations in shared memory return no error: a thread of each rank polls MPI.
Other MPI libraries and launchers end the job themselves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from mpi4py import MPI

from hpctrain.comm.transport.waiting import interruption, waiting
from hpctrain.errors import RankFailedError
from hpctrain.log import logger

_ENABLED = "OMPI_MCA_mpi_ft_enable"  # set by --with-ft ulfm
_YES = ("1", "true", "yes", "ulfm", "mpi")
_SENDING = 0.5  # seconds in which the messages of a rank that ends the job arrive
_FIRST = 1.0  # seconds that other ranks than rank 0 wait for another one to end the job: not all may be killed


def reports_failures(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether MPI reports dead ranks, instead of ending the job."""
    return environ.get(_ENABLED, "").lower() in _YES and MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN


def abort(code: int) -> NoReturn:
    """End the job from this rank with an exit code: all ranks of the world.

    With fault tolerance, ``MPI_Abort`` ends its own rank alone, and no other one learns of it, nor of a rank that
    exits; of a rank that is killed they do, and end themselves. The launcher's exit code is that of a rank that exits.
    """
    if not reports_failures():
        MPI.COMM_WORLD.Abort(code)
    world = MPI.COMM_WORLD
    deadline = time.monotonic() + (_SENDING if world.Get_rank() == 0 else _FIRST)
    while world.Get_size() > 1 and not _another_has_died(world):
        if time.monotonic() > deadline:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    os._exit(code)


def _another_has_died(world: MPI.Intracomm) -> bool:
    """Return whether a rank has died since the last recovery; also sends what is in progress."""
    with suppress_rank_failures():
        world.Iprobe(MPI.ANY_SOURCE, 0)
    if detectors := list(_DETECTORS):
        return any(detector.dead() for detector in detectors)
    failed = world.Get_failed()
    try:
        return bool(failed.Get_size())
    finally:
        failed.Free()


# Classes of MPI errors that mean that another rank has died; empty if MPI does not report it.
RANK_FAILURES = frozenset(
    (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED) if reports_failures() else ()
)


def is_rank_failure(error: BaseException | None, classes: Collection[int] = RANK_FAILURES) -> bool:
    """Return whether an error of MPI means that another rank has died."""
    return isinstance(error, MPI.Exception) and error.Get_error_class() in classes


def all_complete(
    call: Callable[..., bool], requests: Sequence[MPI.Request], statuses: list[MPI.Status] | None = None
) -> bool:
    """Return what ``MPI.Request.Waitall`` or ``Testall`` returns; raise ``RankFailedError`` if another rank has died.

    The error of several requests (``ERR_IN_STATUS``) does not tell its cause, unlike that of each of them. A rank
    whose communicator another one has revoked may not know of a dead rank yet.
    """
    if not RANK_FAILURES and statuses is None:
        return call(requests)
    found = [MPI.Status() for _ in requests] if statuses is None else statuses
    try:
        return call(requests, found)
    except MPI.Exception as error:
        if error.Get_error_class() == MPI.ERR_IN_STATUS:
            if RANK_FAILURES & {MPI.Get_error_class(status.Get_error()) for status in found}:
                raise RankFailedError("another rank has died") from error
        raise


_REVOCABLE: weakref.WeakValueDictionary[int, MPI.Intracomm] = weakref.WeakValueDictionary()
_DETECTORS: weakref.WeakSet[FailureDetector] = weakref.WeakSet()


def verify(comm: MPI.Intracomm) -> None:
    """Raise ``RankFailedError`` if a collective of this communicator may not have been completed.

    Open MPI does not always report an error for a collective with a dead rank: its result is then garbage.
    """
    if not RANK_FAILURES:
        return
    failed = comm.Get_failed()
    try:
        if comm.Is_revoked() or failed.Get_size():
            raise RankFailedError("another rank has died")
    finally:
        failed.Free()


def register(comm: MPI.Intracomm) -> None:
    """Let operations of a communicator end with an error on all its ranks when one of them has died.

    Otherwise, a rank would wait without end for another one that lives and has met the error before.
    """
    if RANK_FAILURES:
        _REVOCABLE[id(comm)] = comm
        if interruption.reason:  # the others have been revoked already
            comm.Revoke()


class FailureDetector:
    """Detector of dead ranks with its own communicators. Construction is collective over ``comm``.

    Ranks keep the numbers that they have in ``comm``. With ``continues``, the job continues without dead
    ranks, else it ends.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._base = comm.Dup(), comm.Dup()
        self.hosts: list[str] = comm.allgather(socket.gethostname())
        self.rank = comm.Get_rank()
        self._lost: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self.continues = False
        _DETECTORS.add(self)

    @property
    def has_lost(self) -> bool:
        """Whether the job continues without some of its ranks."""
        return bool(self._lost)

    @property
    def is_last(self) -> bool:
        """Whether all other ranks have died."""
        return len(self._lost) + len(self.dead()) == len(self.hosts) - 1

    def dead(self) -> list[int]:
        """Return the ranks that have died since the last ``survivors``; sends no message, and does not wait."""
        with suppress_rank_failures():
            self._comm.Iprobe(MPI.ANY_SOURCE, 0)  # MPI detects failures while it is called
        failed = self._comm.Get_failed()
        try:
            ranks = failed.Translate_ranks(None, self._comm.group)
        finally:
            failed.Free()
        return sorted({*ranks} - self._lost)

    def interrupt(self) -> None:
        """If another rank has died, let all waits of this process, and MPI operations of all ranks, end with an error.

        The operations of other ranks end because the communicators are revoked.
        """
        with self._lock:
            if interruption.reason or not (dead := self.dead()):
                return
            interruption.reason = self.describe(dead)
            for comm in list(_REVOCABLE.values()):
                with suppress(MPI.Exception):  # it has been freed
                    comm.Revoke()

    def survivors(self) -> tuple[MPI.Intracomm, list[int]]:
        """Return a communicator of the ranks that live, and the ranks that have died since the last call.

        Collective over the ranks that live. From here on, waits end with an error only if one of these dies.
        """
        comm = self._base.Shrink()
        assert isinstance(comm, MPI.Intracomm)
        with self._lock:
            alive = comm.group.Translate_ranks(None, self._base.group)
            lost = frozenset(range(self._base.Get_size())) - {*alive}
            new, self._lost = sorted(lost - self._lost), lost
            interruption.reason = ""
        register(comm)
        return comm, new

    def skip_finalize_barrier(self) -> None:
        """From now on, do not wait for all ranks of the job in MPI_Finalize.

        The launcher counts dead ranks among them, and sometimes does not notice that they have died. The
        barrier is that of PMIx; that of MPI itself is between the ranks that live.
        """
        try:
            skips = ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_async_mpi_finalize")
        except ValueError:
            logger.warning("this MPI library may wait for dead ranks without end when the job ends")
        else:
            skips.value = True

    def describe(self, ranks: Sequence[int]) -> str:
        """Return which ranks have died, as the subject of a sentence."""
        return dead_ranks(ranks, self.hosts)


@contextmanager
def suppress_rank_failures() -> Iterator[None]:
    """Ignore errors of MPI in the ``with`` block that mean that another rank has died."""
    try:
        yield
    except MPI.Exception as error:
        if not is_rank_failure(error):
            raise


def dead_ranks(ranks: Sequence[int], hosts: Sequence[str], most: int = 8) -> str:
    """Return a sentence about ranks that have died; ``hosts`` are those of all ranks."""
    named = [f"{rank} on {hosts[rank]}" for rank in ranks[:most]]
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank {named[0]} has died" if len(ranks) == 1 else f"ranks {', '.join(named)}{more} have died"


def rank_failed(
    error: BaseException, operation: str, classes: Collection[int] = RANK_FAILURES
) -> RankFailedError | None:
    """Return the error to raise if an operation has failed because another rank has died; otherwise None."""
    if not isinstance(error, MPI.Exception):
        return None
    known = _dead()  # then any error of MPI may be due to that
    if is_rank_failure(error, classes) or known:
        return RankFailedError(f"{operation}: {known or 'another rank has died'}")
    return None


def _dead() -> str:
    """Return which ranks have died since the last recovery; empty if this rank knows of none."""
    named = (detector.describe(dead) for detector in list(_DETECTORS) if (dead := detector.dead()))
    return interruption.reason or next(named, "")


waiting.translate = rank_failed
