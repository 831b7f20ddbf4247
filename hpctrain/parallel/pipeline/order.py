"""Dependencies between the actions of a pipeline, and an order in which they can be executed.

Receives block and sends do not. The order in which ranks are visited therefore makes no difference:
once an action can be executed, it stays executable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.parallel.pipeline.action import Action, Kind
from hpctrain.parallel.pipeline.schedule import Schedule

Done = tuple[str, int, int]  # dependency: "activations" or "gradients" of a chunk's inputs, chunk, microbatch


@dataclass(frozen=True)
class Order:
    """Actions in an executable order, and the actions at which ranks are ``stuck``."""

    actions: list[tuple[int, Action]]
    stuck: dict[int, Action]


def needs(action: Action, chunks: int) -> Iterator[Done]:
    """Yield the dependencies of an action: passes of the neighbouring chunks, and earlier passes of its own chunk."""
    chunk, microbatch = action.chunk, action.microbatch
    if action.kind is Kind.FORWARD and chunk:
        yield "activations", chunk - 1, microbatch
    if action.kind in (Kind.BACKWARD, Kind.INPUT):
        yield "activations", chunk, microbatch
        if chunk + 1 < chunks:
            yield "gradients", chunk + 1, microbatch
    if action.kind is Kind.WEIGHT:
        yield "gradients", chunk, microbatch


def gives(action: Action) -> Done | None:
    """Return the dependency that an action satisfies."""
    if action.kind is Kind.FORWARD:
        return "activations", action.chunk, action.microbatch
    if action.kind in (Kind.BACKWARD, Kind.INPUT):
        return "gradients", action.chunk, action.microbatch
    return None


def playable(schedule: Schedule) -> Order:
    """Execute a schedule symbolically, as far as possible, and return the order."""
    done: set[Done | None] = set()
    places = [0] * schedule.ranks
    order: list[tuple[int, Action]] = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while places[rank] < len(actions) and done.issuperset(needs(actions[places[rank]], schedule.chunks)):
                action = actions[places[rank]]
                done.add(gives(action))
                order.append((rank, action))
                places[rank] += 1
                moved = True
    left = {rank: actions[places[rank]] for rank, actions in enumerate(schedule.actions) if places[rank] < len(actions)}
    return Order(order, left)
