"""Unsharding on demand (ZeRO 3): units are gathered before they compute and freed afterwards, forward and backward.

Note: why an order is needed. A collective deadlocks if one rank does not enter it. A rank that
skips a unit (because it has no sample, or takes another branch) would not enter the unit's
collectives. Therefore the first pass records what it gathers and reduces, and all ranks follow the
record of rank 0. A rank that needs an action first executes all actions before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.fsdp.hooks import UnitHooks
from hpctrain.parallel.fsdp.param_group import CommStream, ParamGroup, StreamWork

# A collective action: gather the unit, or reduce the parameter group, of this index.
Action = tuple[Literal["gather", "reduce"], int]


@dataclass(frozen=True)
class PassPlan:
    """Actions of a forward pass, and of the backward pass that follows it."""

    forward: list[Action]
    backward: list[Action]

    def knows(self, action: Action) -> bool:
        """Return whether an action is part of either pass."""
        return action in self.forward or action in self.backward

    def without_reductions(self) -> PassPlan:
        """Return the plan of a pass whose gradients are not reduced."""
        return PassPlan(self.forward, [action for action in self.backward if action[0] == "gather"])


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


class PlanCursor:
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


# Unsharding on demand (ZeRO 3)
#
# Note: the states of a unit in a step. A unit is gathered before its forward pass and freed after it.
# It is gathered again when the backward pass reaches its outputs. It is freed when the gradients of
# its inputs and of its parameters have been computed (see ``unit_hooks``). The model's own unit stays
# unsharded from the forward pass to the end of the backward pass. On a device with streams, the next
# units are gathered while one computes: at most ``prefetch`` of them, because each one takes memory.


class UnitReducer(Protocol):
    """Reducer of gradients, group by group, in the order of a plan."""

    def hurry(self, number: int) -> None:
        """Reduce the groups up to ``number``, with zeros for gradients that this rank does not compute."""


@dataclass(eq=False)
class UnitState:
    """State of one unit: its parameter groups, and whether they are unsharded."""

    number: int
    name: str
    module: nn.Module
    pieces: list[ParamGroup]
    tickets: list[StreamWork] = field(
        default_factory=list
    )  # handles of its all-gathers until they have been waited for
    gathered: bool = False
    shown: bool = False

    def show(self) -> None:
        """Wait for the all-gathers of the unit, and register its unsharded parameters in the module."""
        for ticket in self.tickets:
            ticket.wait()
        self.tickets.clear()
        if not self.shown:
            self.shown = True
            for piece in self.pieces:
                piece.show_whole()

    def hide(self) -> None:
        """Register the shards in the module."""
        if self.shown:
            self.shown = False
            for piece in self.pieces:
                piece.show_shards()

    def release(self) -> None:
        """Reshard the unit: free the memory of its unsharded parameters."""
        self.hide()
        for ticket in self.tickets:
            ticket.wait()
        self.tickets.clear()
        if self.gathered:
            self.gathered = False
            for piece in self.pieces:
                piece.free()


class UnshardOnDemand:
    """Residency that unshards as few units at a time as the passes allow.

    All ranks gather units in the same order (see ``order``). The first of ``stations`` is the
    model's own unit.
    """

    def __init__(self, stations: Sequence[UnitState], comm: Communicator, lane: CommStream, prefetch: int) -> None:
        self._stations, self._comm, self._lane = stations, comm, lane
        self._depth = prefetch if lane.beside else 0
        self._plan: PassPlan | None = None
        self._walk: PlanCursor | None = None
        self._record: PassPlan | None = None  # recorded in the first forward and backward pass
        self._going_back = False
        self._hooks: list[UnitHooks] = []
        self.reducer: UnitReducer | None = None
        self.idle = False  # while all units are unsharded at once, the hooks of units have no effect

    def mark(self, *, frozen: bool = False) -> None:
        """Do nothing: units are gathered again for each pass, and are never stale."""

    def meet(self) -> None:
        """Do nothing: no other rank computes with this rank's memory."""

    def hook(self, model: nn.Module, begins: Callable[[], None]) -> list[RemovableHandle]:
        """Register the hooks that unshard and reshard units as the model runs."""
        self._hooks = [UnitHooks(self, station, begins) for station in self._stations[1:]]
        return [handle for unit in self._hooks for handle in unit.attach()]

    # Passes -----------------------------------------------------------------------------------------------------------

    def begin_forward(self, *, records: bool) -> None:
        """Begin a forward pass of the whole model; ``records``: learn its order of collectives, if that is unknown."""
        self._record = PassPlan([], []) if records and self._plan is None else None
        self._walk = PlanCursor(self._plan.forward) if self._plan else None
        self.need(self._stations[0])

    def end_forward(self, *, keeps: bool) -> None:
        """Execute the rest of the plan; free the model's own unit unless ``keeps``: a backward pass may follow."""
        self._do_the_rest()
        self._stations[0].hide()
        if not keeps:
            self.release(self._stations[0])

    def begin_backward(self, *, reduces: bool) -> None:
        """Begin a backward pass."""
        self._going_back = True
        if self._plan is not None:
            plan = self._plan if reduces else self._plan.without_reductions()
            self._walk = PlanCursor(plan.backward)
        self.need(self._stations[0])

    def end_backward(self) -> None:
        """Execute the rest of the plan, and free all units."""
        self._do_the_rest()
        for station in self._stations:
            self.release(station)
        for unit in self._hooks:
            unit.end()
        self._going_back = False

    def drain(self, world: Communicator) -> None:
        """Make all ranks use the order that rank 0 has recorded. Collective, at the end of a pass."""
        if self._plan is None and (plan := world.broadcast_object(self._record)) is not None:
            self._plan = PassPlan(plan.forward, hastened(plan.backward, self._depth))
        self._record = None

    def join_pass(self, *, backward: bool) -> None:
        """Take part in the collectives of a pass without computing."""
        if self._plan is None:
            raise UsageError(
                f"rank {self._comm.rank} has no sample, but the first step needs some of every rank, because it shows "
                "in which order units are gathered: make the batch larger"
            )
        self._walk = PlanCursor(self._plan.forward)
        self._do_the_rest()
        if backward:
            self._walk = PlanCursor(self._plan.backward)
            self._do_the_rest()

    def unshard(self) -> None:
        """Unshard all units at once. Collective."""
        self._walk = self._record = None
        for station in self._stations:
            self.need(station)
        self.idle = True

    def reshard(self) -> None:
        """Reshard all units."""
        self.idle = False
        for station in self._stations:
            self.release(station)

    # Units ------------------------------------------------------------------------------------------------------------

    @property
    def going_back(self) -> bool:
        """Return whether a backward pass is in progress."""
        return self._going_back

    def need(self, station: UnitState) -> None:
        """Unshard a unit for the computation that follows."""
        if not station.gathered or station.tickets:
            self._want(("gather", station.number))
        station.show()

    def release(self, station: UnitState) -> None:
        """Reshard a unit."""
        station.release()

    # Reductions (a ``Watcher``) ---------------------------------------------------------------------------------------

    def reducing(self, piece: int) -> None:
        """Execute the actions that the plan lists before a reduction that is about to start."""
        for action in self._walk.before(("reduce", piece)) if self._walk is not None else []:
            self._do(action)

    def complete(self, piece: int) -> None:
        """Record that all gradients of a group have been computed."""
        if self._record is not None:
            self._record.backward.append(("reduce", piece))

    # Internals --------------------------------------------------------------------------------------------------------

    def _want(self, action: Action) -> None:
        if self._walk is None:
            if self._record is not None:
                (self._record.backward if self._going_back else self._record.forward).append(action)
            self._do(action)
            return
        for other in self._due(self._walk, action):
            self._do(other)
            if other != action:
                self._pass_by(other)
        for other in self._walk.ahead(self._depth):
            self._do(other)

    def _due(self, walk: PlanCursor, action: Action) -> list[Action]:
        due = walk.until(action)
        if due is not None:
            return due
        if self._plan is not None and not self._plan.knows(action):
            return [action]  # the first pass did not use it; now all ranks do
        name = self._stations[action[1]].name
        raise UsageError(
            f"{f'unit {name}' if name else 'the model'} runs more often, or in another order, than in the first step, "
            "whose order all ranks keep to: let units run in one order, make one unit of what changes places, and "
            "checkpoint activations with use_reentrant=False"
        )

    def _do(self, action: Action) -> None:
        kind, number = action
        if kind == "gather":
            self._gather(self._stations[number])
        elif self.reducer is not None:
            self.reducer.hurry(number)

    def _gather(self, station: UnitState) -> None:
        if station.gathered:
            return
        station.gathered = True
        for piece in station.pieces:
            piece.make_room()
            station.tickets.append(self._lane.run(piece.gather))

    def _pass_by(self, action: Action) -> None:
        """Free a unit that was gathered only because other ranks need it."""
        if action[0] == "gather" and not self._stations[action[1]].shown:
            self._stations[action[1]].release()

    def _do_the_rest(self) -> None:
        walk, self._walk = self._walk, None
        for action in walk.rest() if walk is not None else []:
            self._do(action)
            self._pass_by(action)
