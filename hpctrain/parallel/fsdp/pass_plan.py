"""Recorded order of gathers and reductions in a pass, the same on all ranks.

Note: why an order is needed. A collective deadlocks if one rank does not enter it. A rank that
skips a unit (because it has no sample, or takes another branch) would not enter the unit's
collectives. Therefore the first pass records what it gathers and reduces, and all ranks follow the
record of rank 0. A rank that needs an action first executes all actions before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# A collective action: gather the unit, or reduce the parameter group, of this index.
Action = tuple[Literal["gather", "reduce"], int]


@dataclass(frozen=True)
class PassPlan:
    """Actions of a forward pass, and of the backward pass that follows it."""

    forward: list[Action]
    backward: list[Action]

    def contains(self, action: Action) -> bool:
        """Return whether an action is part of either pass."""
        return action in self.forward or action in self.backward

    def without_reductions(self) -> PassPlan:
        """Return the plan of a pass whose gradients are not reduced."""
        return PassPlan(self.forward, [action for action in self.backward if action[0] == "gather"])


def hoist_gathers(actions: Sequence[Action], prefetch: int) -> list[Action]:
    """Move every gather before the ``prefetch`` reductions that precede it, so that it is complete in time."""
    hoisted: list[Action] = []
    for action in actions:
        position = len(hoisted)
        if action[0] == "gather":
            for _ in range(prefetch):
                reductions = [index for index in range(position) if hoisted[index][0] == "reduce"]
                position = reductions[-1] if reductions else position
        hoisted.insert(position, action)
    return hoisted


class PlanCursor:
    """Position of a rank in a list of actions: those that it has executed, and those that it has requested."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._executed = 0  # number of actions that have been executed
        self._requested = 0  # number of actions up to the last one that was requested

    def advance_to(self, action: Action) -> list[Action] | None:
        """Return the actions still to be executed up to ``action``, inclusive; None if it does not occur any more."""
        for position in range(self._requested, len(self._actions)):
            if self._actions[position] == action:
                self._requested = position + 1
                return self._advance(position + 1)
        return None

    def actions_before(self, action: Action) -> list[Action]:
        """Return the actions still to be executed before one that is being executed, possibly ahead of its position."""
        if action not in self._actions[self._executed :]:
            return []
        return self._advance(self._actions.index(action, self._executed) + 1)[:-1]

    def next_gathers(self, prefetch: int) -> list[Action]:
        """Return the next gathers, as long as at most ``prefetch`` units are gathered that were not requested yet."""
        position = self._executed
        unrequested = sum(kind == "gather" for kind, _ in self._actions[self._requested : position])
        while position < len(self._actions) and self._actions[position][0] == "gather" and unrequested < prefetch:
            position, unrequested = position + 1, unrequested + 1
        return self._advance(position)

    def _advance(self, position: int) -> list[Action]:
        due = list(self._actions[self._executed : position])
        self._executed = max(self._executed, position)
        return due

    def remaining(self) -> list[Action]:
        """Return all actions still to be executed."""
        self._requested = len(self._actions)
        return self._advance(len(self._actions))
