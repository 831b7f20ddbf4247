"""Hold a schedule to what every schedule promises; none that ``make`` returns can fail here."""

from __future__ import annotations

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.action import Action, Kind
from hpctrain.parallel.pipeline.order import playable
from hpctrain.parallel.pipeline.schedule import Schedule

# Together they leave no pass out: what has no whole backward pass has both halves.
_ONCE = ((Kind.FORWARD,), (Kind.BACKWARD, Kind.INPUT), (Kind.BACKWARD, Kind.WEIGHT))


def check(schedule: Schedule) -> None:
    """Raise ``UsageError`` unless a schedule computes everything once, in order, and comes to its end.

    Every chunk takes each microbatch forwards once and back once, in one piece or in two, in the order of the
    microbatches; updates follow their backward pass at once and leave the last one out. Where receives block and sends
    do not, no rank waits for ever.
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
    return UsageError(f"the schedule {schedule.name} cannot be played: {why}", everywhere=True)
