"""An iteration of a run's loop, what the loop tells of it, and the wait of a rank that has left the loop within one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.train.feed import Item

PATIENCE = 10.0  # seconds that a rank which has left the loop within a step waits for the others


@dataclass
class Iteration:
    """An iteration under way."""

    item: Item
    started: float
    waited: float  # seconds in communication before it
    updated: bool = False


@dataclass(frozen=True)
class Around:
    """What the loop tells of its progress, and asks for its orders."""

    record: Callable[[dict[str, Any]], None]  # a row of metrics
    figures: Callable[[], Mapping[str, Any]]  # numbers of the strategies for a row; collective
    save: Callable[[], object]  # a checkpoint now
    save_due: Callable[[], object]  # a checkpoint on the way
    advance: Callable[[], object]  # a checkpoint that is being written
    saved: Callable[[], object]  # a wish to save has been fulfilled
    look: Callable[[], tuple[bool, bool]]  # reasons to stop, and to save, that this rank knows
    reason: Callable[[], str]  # why the run leaves
    busy: Callable[[], bool]  # whether this rank's writer is at work
    timed: Callable[[float], None]  # seconds of a step
    go_back: Callable[[], None]  # to the last checkpoint
    meet: Callable[[str], None]  # ranks at their own pace, before a collective
    begin_step: Callable[[int], None]
    end_step: Callable[[], None]


def await_others(comm: Communicator, step: int, seconds: float = PATIENCE) -> None:
    """Return when all ranks have come here, that is, have left the loop within a step; raise if some have not.

    By messages, which need no other rank to wait: one that stays in its loop waits for this one elsewhere.
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
