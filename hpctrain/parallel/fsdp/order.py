"""Order of the collectives of a pass, the same on all ranks: a list of actions, and a cursor in the list.

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
class Plan:
    """Actions of a forward pass, and of the backward pass that follows it."""

    forward: list[Action]
    backward: list[Action]

    def knows(self, action: Action) -> bool:
        """Return whether an action is part of either pass."""
        return action in self.forward or action in self.backward

    def without_reductions(self) -> Plan:
        """Return the plan of a pass whose gradients are not reduced."""
        return Plan(self.forward, [action for action in self.backward if action[0] == "gather"])


def hastened(actions: Sequence[Action], depth: int) -> list[Action]:
    """Move every gather before the ``depth`` reductions that precede it, so that it is complete when it is needed."""
    found: list[Action] = []
    for action in actions:
        position = len(found)
        if action[0] == "gather":
            for _ in range(depth):
                reductions = [place for place in range(position) if found[place][0] == "reduce"]
                position = reductions[-1] if reductions else position
        found.insert(position, action)
    return found


class Walk:
    """Cursor in a list of actions."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._done = 0  # number of actions that have been executed
        self._wanted = 0  # number of actions up to the last one that was requested

    def until(self, action: Action) -> list[Action] | None:
        """Return the actions still to be executed up to ``action``, inclusive; None if it does not occur any more."""
        for place in range(self._wanted, len(self._actions)):
            if self._actions[place] == action:
                self._wanted = place + 1
                return self._up_to(place + 1)
        return None

    def before(self, action: Action) -> list[Action]:
        """Return the actions still to be executed before one that is being executed, possibly ahead of its position."""
        if action not in self._actions[self._done :]:
            return []
        return self._up_to(self._actions.index(action, self._done) + 1)[:-1]

    def ahead(self, depth: int) -> list[Action]:
        """Return the next gathers, as long as at most ``depth`` units are gathered that were not requested yet."""
        place = self._done
        early = sum(kind == "gather" for kind, _ in self._actions[self._wanted : place])
        while place < len(self._actions) and self._actions[place][0] == "gather" and early < depth:
            place, early = place + 1, early + 1
        return self._up_to(place)

    def _up_to(self, place: int) -> list[Action]:
        due = list(self._actions[self._done : place])
        self._done = max(self._done, place)
        return due

    def rest(self) -> list[Action]:
        """Return all actions still to be executed."""
        self._wanted = len(self._actions)
        return self._up_to(len(self._actions))
