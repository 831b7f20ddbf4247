"""Iteration of a run's loop, the loop's callbacks, and the wait of a rank that left the loop by ``break``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.train.feed import Item

PATIENCE = 10.0  # seconds that a rank which has left the loop within a step waits for the other ranks


@dataclass
class Iteration:
    """Iteration in progress."""

    item: Item
    started: float
    waited: float  # seconds in communication before this iteration
    updated: bool = False


@dataclass(frozen=True)
class LoopCallbacks:
    """Callbacks with which the loop reports its progress and asks whether to save or stop."""

    record: Callable[[dict[str, Any]], None]  # write a row of metrics
    metrics: Callable[[], Mapping[str, Any]]  # metrics of the strategies for a row; collective
    save: Callable[[], object]  # write a checkpoint now
    save_due: Callable[[], object]  # write a periodic checkpoint that is due
    advance: Callable[[], object]  # advance a checkpoint that is being written
    saved: Callable[[], object]  # a save request has been fulfilled
    poll: Callable[[], tuple[bool, bool]]  # whether this rank has a reason to stop, and one to save
    reason: Callable[[], str]  # why the run stops
    busy: Callable[[], bool]  # whether this rank's checkpoint writer is active
    timed: Callable[[float], None]  # report the seconds of a step
    roll_back: Callable[[], None]  # roll back to the last checkpoint
    synchronize: Callable[[str], None]  # synchronize asynchronous ranks before a collective
    begin_step: Callable[[int], None]
    end_step: Callable[[], None]


def await_others(comm: Communicator, step: int, seconds: float = PATIENCE) -> None:
    """Return when all ranks have left the loop within a step; raise ``UsageError`` if some have not.

    Point-to-point messages are used instead of a collective: a rank that is still in its loop waits
    for this rank in another operation.
    """
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    word = torch.zeros(1)
    works = [comm.isend(word, rank) for rank in others]
    works += [comm.irecv(torch.zeros(1), rank) for rank in others]
    deadline = time.monotonic() + seconds
    while not all(work.done() for work in works):
        if time.monotonic() > deadline:
            raise UsageError(
                f"rank {comm.rank} left the loop by break in step {step}, before its update, and other ranks did not; "
                'leave it on all ranks, or call run.stop("reason"), which the ranks agree on'
            )
        time.sleep(0.001)
