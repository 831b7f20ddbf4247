"""Validation of a pipeline schedule against the rules of every schedule; schedules from ``make`` always pass."""

from __future__ import annotations

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.action import Action, Kind
from hpctrain.parallel.pipeline.order import playable
from hpctrain.parallel.pipeline.schedule import Schedule

# Together these leave no pass out: a microbatch without a whole backward pass has both halves.
_ONCE = ((Kind.FORWARD,), (Kind.BACKWARD, Kind.INPUT), (Kind.BACKWARD, Kind.WEIGHT))


def check(schedule: Schedule) -> None:
    """Raise ``UsageError`` unless a schedule computes every pass once, in order, and without deadlock.

    Every chunk computes one forward and one backward pass per microbatch, in the order of the
    microbatches. A backward pass is one action, or an input pass and a weight pass. Updates
    directly follow their backward pass; the last microbatch has none. With blocking receives and
    buffered sends, no rank waits forever.
    """
    if len(schedule.actions) != schedule.ranks or schedule.chunks % schedule.ranks:
        raise _refused(schedule, f"{len(schedule.actions)} lists of actions, {schedule.chunks} chunks")
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not 0 <= action.chunk < schedule.chunks or schedule.rank_of(action.chunk) != rank:
                raise _refused(schedule, f"{action} of chunk {action.chunk} on rank {rank}, which does not hold it")
        _check_updates(schedule, actions)
        for chunk in range(rank, schedule.chunks, schedule.ranks):
            _check_chunk(schedule, [action for action in actions if action.chunk == chunk], chunk)
    stuck = playable(schedule).stuck
    if stuck:
        waits = ", ".join(f"rank {rank} in {action} of chunk {action.chunk}" for rank, action in stuck.items())
        raise _refused(schedule, f"ranks wait for each other: {waits}")


def _check_chunk(schedule: Schedule, actions: list[Action], chunk: int) -> None:
    for kinds in _ONCE:
        found = [action.microbatch for action in actions if action.kind in kinds]
        if found != list(range(schedule.microbatches)):
            names = " or ".join(kind.word for kind in kinds)
            raise _refused(schedule, f"{names} passes of chunk {chunk} come as {found}")


def _check_updates(schedule: Schedule, actions: tuple[Action, ...]) -> None:
    last = schedule.microbatches - 1
    for before, action in zip((None, *actions), actions):
        if action.kind is Kind.UPDATE:
            if before != Action(Kind.BACKWARD, action.chunk, action.microbatch) or action.microbatch == last:
                raise _refused(schedule, f"{action} of chunk {action.chunk} after {before}")


def _refused(schedule: Schedule, why: str) -> UsageError:
    return UsageError(f"the schedule {schedule.name} cannot be executed: {why}", everywhere=True)
