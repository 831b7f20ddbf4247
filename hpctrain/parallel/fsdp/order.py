"""Keep the collectives of a pass in one order on all ranks: a list of actions, and a walk along it.

Note: why an order. A collective that another rank does not enter never ends, and a rank that leaves out a unit (it has
no sample, or takes another branch) would leave it out there. So the first pass writes down what it gathers and reduces,
and all ranks keep to what rank 0 has written: who needs an action first does all those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# What all ranks do together: gather the unit, or reduce the piece, of this number.
Action = tuple[Literal["gather", "reduce"], int]


@dataclass(frozen=True)
class Plan:
    """Hold the actions of a forward pass, and of the backward pass that follows it."""

    forward: list[Action]
    backward: list[Action]

    def knows(self, action: Action) -> bool:
        """Tell whether an action comes in any pass."""
        return action in self.forward or action in self.backward

    def without_reductions(self) -> Plan:
        """Return the plan of a pass whose gradients stay on their rank."""
        return Plan(self.forward, [action for action in self.backward if action[0] == "gather"])


def hastened(actions: Sequence[Action], depth: int) -> list[Action]:
    """Move every gathering before the ``depth`` reductions that precede it: it is to be there when it is needed."""
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
    """Go along a list of actions."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._done = 0  # so many have been done
        self._wanted = 0  # so many were wanted, or came before one that was

    def until(self, action: Action) -> list[Action] | None:
        """Return what is still to be done up to an action, this one included; None where it does not come any more."""
        for place in range(self._wanted, len(self._actions)):
            if self._actions[place] == action:
                self._wanted = place + 1
                return self._up_to(place + 1)
        return None

    def before(self, action: Action) -> list[Action]:
        """Return what is still to be done before an action that is being done, some of it perhaps early."""
        if action not in self._actions[self._done :]:
            return []
        return self._up_to(self._actions.index(action, self._done) + 1)[:-1]

    def ahead(self, depth: int) -> list[Action]:
        """Return the gatherings that come next, as long as no more than ``depth`` are there that nobody wanted yet."""
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
        """Return all that is still to be done."""
        self._wanted = len(self._actions)
        return self._up_to(len(self._actions))
