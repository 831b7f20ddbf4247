"""Replicas of a split model of which a rank has died, with pipelines and tensor parallelism.

Each rank of such a replica holds a part of the model that no other rank of it has. Its other ranks
therefore leave the job, and the other replicas continue.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from hpctrain.errors import LostReplicasError
from hpctrain.log import logger
from hpctrain.parallel.strategy import Strategy
from hpctrain.util.text import counted

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.transport.failures import FailureDetector


def leave_incomplete(comm: MPI.Intracomm, detector: FailureDetector, strategies: Sequence[Strategy]) -> list[int]:
    """End this rank if another rank of its replica has died; return the ranks that have ended so. Collective.

    ``comm`` has the ranks that live. Raises ``LostReplicasError`` on all of them if no replica is complete.
    """
    replica = next((one.replica for one in strategies if one.replica is not None), None)
    if replica is None:
        return []
    number, size = replica
    everyone: list[tuple[int, int]] = comm.allgather((number, detector.rank))
    leaving = incomplete(everyone, size)
    if len(leaving) == len(everyone):
        gone = sorted({*range(len(detector.hosts))} - {rank for _, rank in everyone})
        raise LostReplicasError(
            f"no replica of the model is left whose ranks all live, because {detector.describe(gone)} or left; the job "
            "must start again"
        )
    if detector.rank in leaving:
        logger.warning("this rank leaves the job: a rank has died that held another part of the same replica")
        leave()
    return leaving


def incomplete(everyone: Sequence[tuple[int, int]], size: int) -> list[int]:
    """Return the ranks whose replica has fewer than ``size`` ranks; ``everyone`` has pairs of replica and rank."""
    count = Counter(number for number, _ in everyone)
    return sorted(rank for number, rank in everyone if count[number] < size)


def losses(describe: Callable[[Sequence[int]], str], lost: Sequence[int], left: Sequence[int]) -> str:
    """Return which ranks have died, and which have left because they held other parts of the same replicas."""
    died = [rank for rank in lost if rank not in left]
    told = describe(died) if died else "a rank has died"
    return f"{told} and {counted(len(left), 'rank')} of the same replica left" if left else told


def leave() -> NoReturn:
    """End this process as if it were killed: other ends of a process are not reported to the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")
