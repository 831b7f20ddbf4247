"""Say which actions of a pipeline wait for which others, and in what order they can be carried out.

Receives block and sends do not, so the order in which ranks are looked at makes no difference: an action that can be
carried out stays so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.parallel.pipeline.action import Action, Kind
from hpctrain.parallel.pipeline.schedule import Schedule

Done = tuple[str, int, int]  # what others wait for: "activations" or "gradients" of a chunk's inputs, chunk, microbatch


@dataclass(frozen=True)
class Order:
    """Hold the actions in an order in which they can be carried out, and at which actions ranks are ``stuck``."""

    actions: list[tuple[int, Action]]
    stuck: dict[int, Action]


def needs(action: Action, chunks: int) -> Iterator[Done]:
    """Yield what an action waits for: its chunk's neighbours, and its own earlier passes."""
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
    """Return what others may have waited for."""
    if action.kind is Kind.FORWARD:
        return "activations", action.chunk, action.microbatch
    if action.kind in (Kind.BACKWARD, Kind.INPUT):
        return "gradients", action.chunk, action.microbatch
    return None


def playable(schedule: Schedule) -> Order:
    """Carry a schedule out as far as it goes."""
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
