"""Ranks that have died, as reported by MPI with fault tolerance (ULFM, ``mpiexec --with-ft ulfm`` of Open MPI).

With it, the launcher does not end the job when a rank dies, and operations with this rank return an
error in the others. Operations in shared memory return no error: a thread of each rank polls MPI.
Other MPI libraries and launchers end the job themselves.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping, Sequence

from mpi4py import MPI

from hpctrain.comm.transport.waiting import waiting
from hpctrain.errors import RankFailedError

_ENABLED = "OMPI_MCA_mpi_ft_enable"  # set by --with-ft ulfm
_YES = ("1", "true", "yes", "ulfm", "mpi")


def reports_failures(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether MPI reports dead ranks, instead of ending the job."""
    return environ.get(_ENABLED, "").lower() in _YES and MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN


# Classes of MPI errors that mean that another rank has died; empty if MPI does not report it.
RANK_FAILURES = frozenset(
    (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED) if reports_failures() else ()
)


def is_rank_failure(error: BaseException | None, classes: Collection[int] = RANK_FAILURES) -> bool:
    """Return whether an error of MPI means that another rank has died."""
    return isinstance(error, MPI.Exception) and error.Get_error_class() in classes


class FailureDetector:
    """Detector of dead ranks with its own communicator. Construction is collective over ``comm``."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self._hosts: list[str] = comm.allgather(socket.gethostname())

    def dead(self) -> list[int]:
        """Return the ranks that have died, in order; sends no message, and does not wait."""
        try:
            self._comm.Iprobe(MPI.ANY_SOURCE, 0)  # MPI detects failures while it is called
        except MPI.Exception as error:
            if not is_rank_failure(error):
                raise
        failed = self._comm.Get_failed()
        try:
            ranks = failed.Translate_ranks(None, self._comm.group)
        finally:
            failed.Free()
        return sorted(ranks)

    def describe(self, ranks: Sequence[int]) -> str:
        """Return which ranks have died, as the subject of a sentence."""
        return dead_ranks(ranks, self._hosts)


def dead_ranks(ranks: Sequence[int], hosts: Sequence[str], most: int = 8) -> str:
    """Return a sentence about ranks that have died; ``hosts`` are those of all ranks."""
    named = [f"{rank} on {hosts[rank]}" for rank in ranks[:most]]
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank {named[0]} has died" if len(ranks) == 1 else f"ranks {', '.join(named)}{more} have died"


def rank_failed(
    error: BaseException, operation: str, classes: Collection[int] = RANK_FAILURES
) -> RankFailedError | None:
    """Return the error to raise if an operation has failed because another rank has died; otherwise None."""
    return RankFailedError(f"{operation}: another rank has died") if is_rank_failure(error, classes) else None


waiting.translate = rank_failed
