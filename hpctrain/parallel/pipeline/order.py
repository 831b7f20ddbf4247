"""Dependencies between the actions of a pipeline, an order in which they can be executed, and validation of schedules.

Receives block and sends do not. The order in which ranks are visited therefore makes no difference:
once an action can be executed, it stays executable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.errors import UsageError
from hpctrain.parallel.pipeline.actions import Action, ActionKind
from hpctrain.parallel.pipeline.schedules import Schedule

Dependency = tuple[str, int, int]  # dependency: "activations" or "gradients" of a chunk's inputs, chunk, microbatch


@dataclass(frozen=True)
class ExecutionOrder:
    """Actions in an executable order, and the actions at which ranks are ``blocked``."""

    actions: list[tuple[int, Action]]
    blocked: dict[int, Action]


def needs(action: Action, chunks: int) -> Iterator[Dependency]:
    """Yield the dependencies of an action: passes of the neighbouring chunks, and earlier passes of its own chunk."""
    chunk, microbatch = action.chunk, action.microbatch
    if action.kind is ActionKind.FORWARD and chunk:
        yield "activations", chunk - 1, microbatch
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT):
        yield "activations", chunk, microbatch
        if chunk + 1 < chunks:
            yield "gradients", chunk + 1, microbatch
    if action.kind is ActionKind.WEIGHT:
        yield "gradients", chunk, microbatch


def satisfies(action: Action) -> Dependency | None:
    """Return the dependency that an action satisfies."""
    if action.kind is ActionKind.FORWARD:
        return "activations", action.chunk, action.microbatch
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT):
        return "gradients", action.chunk, action.microbatch
    return None


def execution_order(schedule: Schedule) -> ExecutionOrder:
    """Execute a schedule symbolically, as far as possible, and return the order."""
    done: set[Dependency | None] = set()
    positions = [0] * schedule.ranks
    order: list[tuple[int, Action]] = []
    progressed = True
    while progressed:
        progressed = False
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions) and done.issuperset(needs(actions[positions[rank]], schedule.chunks)):
                action = actions[positions[rank]]
                done.add(satisfies(action))
                order.append((rank, action))
                positions[rank] += 1
                progressed = True
    blocked = {
        rank: actions[positions[rank]]
        for rank, actions in enumerate(schedule.actions)
        if positions[rank] < len(actions)
    }
    return ExecutionOrder(order, blocked)


# Validation of a pipeline schedule against the rules of every schedule; schedules from ``make`` always pass -----------


# Together these leave no pass out: a microbatch without a whole backward pass has both halves.
_EXACTLY_ONCE = (
    (ActionKind.FORWARD,),
    (ActionKind.BACKWARD, ActionKind.INPUT),
    (ActionKind.BACKWARD, ActionKind.WEIGHT),
)


def check_schedule(schedule: Schedule) -> None:
    """Raise ``UsageError`` unless a schedule computes every pass once, in order, and without deadlock.

    Every chunk computes one forward and one backward pass per microbatch, in the order of the
    microbatches. A backward pass is one action, or an input pass and a weight pass. Updates
    directly follow their backward pass; the last microbatch has none. With blocking receives and
    buffered sends, no rank waits forever.
    """
    if len(schedule.actions) != schedule.ranks or schedule.chunks % schedule.ranks:
        raise _error(schedule, f"{len(schedule.actions)} lists of actions, {schedule.chunks} chunks")
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not 0 <= action.chunk < schedule.chunks or schedule.rank_of(action.chunk) != rank:
                raise _error(schedule, f"{action} of chunk {action.chunk} on rank {rank}, which does not hold it")
        _check_updates(schedule, actions)
        for chunk in range(rank, schedule.chunks, schedule.ranks):
            _check_chunk(schedule, [action for action in actions if action.chunk == chunk], chunk)
    blocked = execution_order(schedule).blocked
    if blocked:
        waits = ", ".join(f"rank {rank} in {action} of chunk {action.chunk}" for rank, action in blocked.items())
        raise _error(schedule, f"ranks wait for each other: {waits}")


def _check_chunk(schedule: Schedule, actions: list[Action], chunk: int) -> None:
    for kinds in _EXACTLY_ONCE:
        found = [action.microbatch for action in actions if action.kind in kinds]
        if found != list(range(schedule.microbatches)):
            names = " or ".join(kind.word for kind in kinds)
            raise _error(schedule, f"{names} passes of chunk {chunk} come as {found}")


def _check_updates(schedule: Schedule, actions: tuple[Action, ...]) -> None:
    last = schedule.microbatches - 1
    for before, action in zip((None, *actions), actions):
        if action.kind is ActionKind.UPDATE:
            if before != Action(ActionKind.BACKWARD, action.chunk, action.microbatch) or action.microbatch == last:
                raise _error(schedule, f"{action} of chunk {action.chunk} after {before}")


def _error(schedule: Schedule, reason: str) -> UsageError:
    return UsageError(f"the schedule {schedule.name} cannot be executed: {reason}", everywhere=True)
