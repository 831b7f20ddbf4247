"""Replicas of a split model of which a rank has died, with pipelines and tensor parallelism.

Each rank of such a replica holds a part of the model that no other rank of it has. Its other ranks
therefore leave the job, and the other replicas continue.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from hpctrain.errors import CommunicationError
from hpctrain.log import logger
from hpctrain.parallel.strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI


def leave_incomplete(comm: MPI.Intracomm, rank: int, strategies: Sequence[Strategy]) -> list[int]:
    """End this rank if another rank of its replica has died; return the ranks that have ended so. Collective.

    ``rank`` is the number of this rank in the job as it began, of which ``comm`` has those that live.
    Raises ``CommunicationError`` on all ranks if no replica is complete.
    """
    replica = next((one.replica for one in strategies if one.replica is not None), None)
    if replica is None:
        return []
    number, size = replica
    everyone: list[tuple[int, int]] = comm.allgather((number, rank))
    leaving = incomplete(everyone, size)
    if len(leaving) == len(everyone):
        raise CommunicationError("no replica of the model is left whose ranks all live; the job must start again")
    if rank in leaving:
        logger.warning("this rank leaves the job: a rank has died that held another part of the same replica")
        leave()
    return leaving


def incomplete(everyone: Sequence[tuple[int, int]], size: int) -> list[int]:
    """Return the ranks whose replica has fewer than ``size`` ranks; ``everyone`` has pairs of replica and rank."""
    count = Counter(number for number, _ in everyone)
    return sorted(rank for number, rank in everyone if count[number] < size)


def leave() -> NoReturn:
    """End this process as if it were killed: other ends of a process are not reported to the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")
