"""Stop and save agreement for asynchronous ranks, and straggler detection, without a wait at the end of every step.

Synchronous ranks would notice such a rank because they wait for it. Asynchronous ranks do not wait,
so they must check.

A rank is a straggler if it is behind this rank and has made no step for a tenth of
``HPCTRAIN_TIMEOUT``, while this rank has made several. A rank that waits at a synchronization is
not behind. A rank that is only slower makes a step in that time. In a job that was suspended as a
whole, no rank has made a step. Observations from before a synchronization are discarded, because
all ranks took part in it. A rank checks only the ranks of its node, where a check is one read of
shared memory. Another node would need a message, which a stopped rank does not answer.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.rma.select import expose
from hpctrain.comm.transport.waiting import SPINS, timeout_seconds, until, waiting
from hpctrain.errors import DeadlineError, UsageError
from hpctrain.log import logger
from hpctrain.parallel.strategy import AsyncStrategy, Strategy
from hpctrain.train.exchange import LOGGED, StepExchange, StepRequests, StepState, different_calls

PART = 0.1  # fraction of HPCTRAIN_TIMEOUT that a rank may take for a step
STEPS = 10  # steps that this rank must have made in that time
PAUSE = 1.0  # seconds between two checks


@dataclass(frozen=True)
class _Seen:
    """First observation of a rank at its current step: the step, the time, and this rank's step at that time."""

    step: int
    when: float
    own: int


class StragglerDetector:
    """Periodic check of the ranks of a node; the lowest rank that is not a straggler itself logs the warning.

    ``step_of`` returns a rank's step, ``sync_count`` the number of synchronizations of this rank.
    """

    def __init__(
        self,
        rank: int,
        node: Sequence[int],
        step_of: Callable[[int], int],
        sync_count: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._others = rank, [other for other in node if other != rank]
        self._step_of, self._sync_count, self._clock = step_of, sync_count, clock
        self._limit = PART * timeout_seconds()
        self._pause = min(PAUSE, self._limit / 4)
        self._meetings, self._next = sync_count(), 0.0
        self._seen: dict[int, _Seen] = {}
        self._said: dict[int, float] = {}  # stragglers, and when each was first seen at its step

    def look(self, step: int) -> None:
        """Check the other ranks; ``step`` is the step that this rank is about to make."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + self._pause
        if self._sync_count() != self._meetings:
            self._meetings = self._sync_count()
            self._seen.clear()
        still = [rank for rank in self._others if self._stands_still(rank, step, now)]
        if all(rank in still for rank in self._others if rank < self._rank):
            for rank in still:
                self._say(rank, now)

    def _stands_still(self, rank: int, step: int, now: float) -> bool:
        its = self._step_of(rank)
        seen = self._seen.get(rank)
        if seen is None or seen.step != its:
            self._seen[rank] = _Seen(its, now, step)
            if (since := self._said.pop(rank, None)) is not None:
                logger.warning("rank %d makes steps again, after %.1f s", rank, now - since)
            return False
        return its < step and now - seen.when >= self._limit and step - seen.own >= STEPS

    def _say(self, rank: int, now: float) -> None:
        if rank not in self._said:
            seen = self._seen[rank]
            self._said[rank] = seen.when
            seconds = now - seen.when
            logger.warning(
                "rank %d has made no step for %.1f s, other ranks continue: it is in step %d", rank, seconds, seen.step
            )


# Stop and save agreement ----------------------------------------------------------------------------------------------
#
# All ranks must stop after the same step. Each rank publishes a step counter in memory that all ranks
# can read: the step that it is about to make. Before this step, it checks whether rank 0 has paused
# it. A rank that must stop or save notifies rank 0. Rank 0 pauses all other ranks, reads their step
# counters, and publishes the latest step that any rank has begun. A paused rank waits for this
# decision, which depends on rank 0 alone. All ranks then continue to that step and synchronize there.
# Step counter and pause flag are modified by atomic operations: a rank either sees the flag, or its
# counter already includes the step that it makes. If rank 0 waits at a synchronization, requests
# wait, too.

_CLOCK, _REQUEST_STOP, _REQUEST_SAVE, _REQUEST_FINAL, _HOLD, _DECISION, _WORDS = range(7)
_FLAGS = 8  # of a decision, in the bits below its step and its number
_FLAG_OF = {"stop": (_REQUEST_STOP, 1), "save": (_REQUEST_SAVE, 2), "final": (_REQUEST_FINAL, 4)}  # word and flag
_NUMBER = 1 << 40


def exchange_for(comm: Communicator, strategy: Strategy, *, alike: bool = False) -> AsyncExchange | StepExchange:
    """Return the end-of-step exchange: synchronous, or asynchronous for ranks that update independently.

    The synchronous exchange uses a separate communicator: a rank that leaves the loop in the middle
    of a step must not match a gradient reduction of the other ranks. ``alike``: the ranks must log
    the same values.
    """
    if isinstance(strategy, AsyncStrategy) and strategy.asynchronous:
        return AsyncExchange(comm, computes=strategy.computes, sync_count=lambda: strategy.sync_count)
    return StepExchange(comm.twin(), alike=alike)


def synchronize(comm: Communicator, strategies: Iterable[Strategy], point: str) -> None:
    """Wait until all ranks have reached the same point, and serve their requests meanwhile. Collective.

    Asynchronous ranks call this before any other collective. A rank that waits in MPI does not
    serve requests for its memory, and a rank on another node may need an answer to reach this
    point. Raises ``UsageError`` on all ranks if they have reached different points.
    """
    try:
        for strategy in strategies:
            if strategy.asynchronous:
                strategy.drain()
    except DeadlineError as error:
        raise DeadlineError(f"{point}: {error}") from error
    points = comm.all_gather_object(point)
    rank = next((rank for rank, other in enumerate(points) if other != points[0]), 0)
    if rank:
        text = different_calls(points[0], rank, points[rank])
        raise UsageError(f"{text}, and give every rank as many batches", everywhere=True)


def check_call(comm: Communicator, strategies: Collection[Strategy], call: str) -> None:
    """Wait until all ranks make the same public call, named ``call``. Collective.

    Raises ``UsageError`` on all ranks if they make different calls, or if some have reached the end
    of a step. A wait longer than ``HPCTRAIN_TIMEOUT`` names the call.
    """
    if comm.size == 1:
        return
    with waiting(call):
        if any(strategy.asynchronous for strategy in strategies):
            synchronize(comm, strategies, call)
        else:
            StepExchange(comm.twin())({}, StepRequests(), 0, StepState(updated=False, call=call))


class AsyncExchange:
    """Average of the latest values logged on this node, and agreement on the step after which all stop or save."""

    def __init__(self, comm: Communicator, *, computes: bool = True, sync_count: Callable[[], int] = lambda: 0) -> None:
        self._comm = comm
        self._computes = computes  # values logged by a rank that computes nothing are ignored
        self._memory = expose(comm.transport, 1 + LOGGED, torch.float64, _WORDS)
        self._decided = 0  # number of pauses that this rank has seen
        self._until, self._flags = 0, 0  # of the decision that has not been carried out
        self._notified: set[int] = set()
        self._written = [0] * comm.size  # on rank 0: the last decision written to each rank
        local_ranks = [rank for rank in range(comm.size) if self._memory.view(rank) is not None]
        step_of = lambda rank: self._memory.fetch_add(rank, _CLOCK)
        self._stragglers = StragglerDetector(comm.rank, local_ranks, step_of, sync_count)

    def __call__(
        self, logged: Mapping[str, float], requests: StepRequests, step: int, step_state: StepState = StepState()
    ) -> tuple[dict[str, float], StepRequests]:
        """Return averages by name, and the action after this step; no rank waits for another rank's loop."""
        self._memory.progress()
        averages = self._averages(logged)
        self._notify_rank_0(requests)
        if self._comm.rank == 0:
            self._decide(step)
        rank = self._comm.rank
        self._memory.fetch_add(rank, _CLOCK, step + 1 - self._memory.fetch_add(rank, _CLOCK))
        self._wait_if_paused()
        if self._computes:  # a rank that computes nothing is ahead of all others and waits
            self._stragglers.look(step + 1)
        due = bool(self._flags) and step >= self._until
        asked = {name: due and bool(self._flags & flag) for name, (_, flag) in _FLAG_OF.items()}
        found = StepRequests(**asked, busy=True)
        if due:
            self._flags = 0
        return averages, found

    def close(self) -> None:
        """Free the shared memory. Collective."""
        self._memory.free()

    # Logged values ----------------------------------------------------------------------------------------------------

    def _averages(self, logged: Mapping[str, float]) -> dict[str, float]:
        """Return the means over the ranks of this node that have logged the same names."""
        names = sorted(logged)
        row = torch.tensor([_checksum(names) * self._computes, *(logged[name] for name in names)], dtype=torch.float64)
        self._memory.put(self._comm.rank, row)
        views = [self._memory.view(rank) for rank in range(self._comm.size)]
        rows = [one[: row.numel()].clone() for one in views if one is not None]
        alike = torch.stack([one for one in rows if one[0] == row[0]])
        return dict(zip(names, alike.mean(dim=0)[1:].tolist()))

    # Requests ---------------------------------------------------------------------------------------------------------

    def _notify_rank_0(self, requests: StepRequests) -> None:
        """Notify rank 0 once of each request."""
        for name, (word, _) in _FLAG_OF.items():
            if getattr(requests, name) and word not in self._notified:
                self._notified.add(word)
                self._memory.fetch_add(0, word, 1)

    def _decide(self, step: int) -> None:
        """Decide on rank 0 if a request exists and no decision is pending."""
        if self._flags:
            return  # after the pending decision
        flags = 0
        for word, flag in _FLAG_OF.values():
            count = self._memory.fetch_add(0, word)
            if count:
                self._memory.fetch_add(0, word, -count)
                flags |= flag
        if not flags:
            return
        latest = step
        for rank in range(1, self._comm.size):
            self._memory.fetch_add(rank, _HOLD, 1)
            latest = max(latest, self._memory.fetch_add(rank, _CLOCK))
        self._decided += 1
        decision = self._decided * _NUMBER + _FLAGS * latest + flags
        for rank in range(1, self._comm.size):
            self._memory.fetch_add(rank, _DECISION, decision - self._written[rank])
            self._written[rank] = decision
        self._apply(decision)

    def _wait_if_paused(self) -> None:
        """Check whether rank 0 has paused this rank; if so, wait for its decision."""
        rank = self._comm.rank
        if rank == 0 or self._memory.fetch_add(rank, _HOLD) == self._decided:
            return
        self._decided += 1
        operation = "rank 0's answer to a request to stop or save"
        with waiting(operation):
            late = f"{operation}: nothing within {timeout_seconds():g} s (HPCTRAIN_TIMEOUT)"
            until(self._has_decided, operation, lambda: late, SPINS, period=1)
        self._apply(self._memory.fetch_add(rank, _DECISION))

    def _has_decided(self) -> bool:
        self._memory.progress()
        return self._memory.fetch_add(self._comm.rank, _DECISION) >= self._decided * _NUMBER

    def _apply(self, decision: int) -> None:
        self._until, self._flags = decision % _NUMBER // _FLAGS, decision % _FLAGS
        self._notified.clear()


def _checksum(names: list[str]) -> float:
    return float(zlib.crc32(",".join(names).encode()))
